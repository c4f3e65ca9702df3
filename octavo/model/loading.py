"""Copying a checkpoint into parameters, tensor by tensor, straight to where it stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import OctavoError
from octavo.model.checkpoint import Checkpoint
from octavo.model.layout import TensorSpec
from octavo.model.parameters import official_tensors
from octavo.model.shards import TORCH_DTYPES, ShardFile

_PIECE_BYTES = 16 << 20
"""How much is copied before the pages of the file are dropped: the memory needed beside the destination."""

_WIDER = {
    "BF16": (torch.bfloat16, torch.float32, torch.float64),
    "F32": (torch.float32, torch.float64),
}
"""Parameter dtypes that hold a stored value exactly. Quantised weights and scales keep their bytes."""


@dataclass(frozen=True, slots=True)
class _Copy:
    name: str
    file: ShardFile
    destination: Tensor

    def pieces(self) -> Iterator[int]:
        """Copy some rows at a time; yield the bytes of each piece."""
        source = self.file.tensor(self.name)
        rows = max(1, _PIECE_BYTES // source[0].nbytes)
        for destination, piece in zip(torch.split(self.destination, rows), torch.split(source, rows), strict=True):
            destination.copy_(piece)
            yield piece.nbytes


def load_parameters(
    parameters: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    *,
    experts: range | None = None,
    draft_experts: range | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill all ``parameters`` in place from ``checkpoint``, on whatever device they are.

    They are named like official tensors, expert stacks as in :mod:`octavo.model.parameters`; ``experts`` and
    ``draft_experts`` say which experts are resident in the layers and in the draft stages (``None``: all). What is
    not among them (layers beyond the last, drafts, Engram tables) is not read. Float parameters may be wider than
    the file (BF16 into float32). ``progress(done, total)`` is called with bytes of the file.

    Nothing is copied before everything is checked. Raises one :class:`OctavoError` that names every parameter without
    a tensor, of another shape, or of a dtype that cannot hold the stored values.
    """
    text = checkpoint.config.text_config
    experts = experts if experts is not None else range(text.n_routed_experts)
    draft_experts = draft_experts if draft_experts is not None else range(text.dspark_n_routed_experts)
    copies: list[_Copy] = []
    problems: list[str] = []
    for name, destination in official_tensors(parameters, experts=experts, draft_experts=draft_experts):
        try:
            problem = _mismatch(name, destination, checkpoint.stored(name))
        except OctavoError as error:
            problem = str(error)
        if problem is None:
            copies.append(_Copy(name, checkpoint.shards.locate(name), destination))
        else:
            problems.append(problem)
    if problems:
        raise OctavoError(
            f"{checkpoint.path} does not fit the model:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )

    _run(copies, progress)


def load_engram_tables(
    tables: Mapping[int, tuple[Tensor, Tensor]],
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy the tables of Engram layers into (weight, scale) by layer, shaped as :meth:`Checkpoint.engram_table` has
    them. ``progress(done, total)`` is called with bytes of the file. Raises :class:`OctavoError` as that does."""
    copies = []
    for layer, pair in tables.items():
        for name, destination in zip(checkpoint.engram_names(layer), pair, strict=True):
            checkpoint.stored(name)
            copies.append(_Copy(name, checkpoint.shards.locate(name), destination))
    _run(copies, progress)


def _run(copies: list[_Copy], progress: Callable[[int, int], None] | None) -> None:
    """Copy in the order of the files, so that storage is read once and forwards."""
    copies.sort(key=lambda copy: (copy.file.path.name, copy.file.spans[copy.name].start))
    done, total = 0, sum(copy.file.spans[copy.name].spec.nbytes for copy in copies)
    mapped = 0
    for copy, following in zip(copies, [*copies[1:], None], strict=True):
        if following is not None:
            following.file.will_need(following.name)
        for size in copy.pieces():
            done, mapped = done + size, mapped + size
            if mapped >= _PIECE_BYTES:
                copy.file.release()
                mapped = 0
            if progress is not None:
                progress(done, total)
        if following is None or following.file is not copy.file:
            copy.file.release()
            mapped = 0


def _mismatch(name: str, destination: Tensor, stored: TensorSpec) -> str | None:
    """Why ``destination`` cannot take the stored tensor, or None."""
    if ".engram.embed." in name:
        return f"{name}: Engram tables are mapped (Checkpoint.engram_table), never copied into parameters"
    if destination.is_meta:
        return f"{name}: the parameter is on the meta device; allocate it first (Module.to_empty)"
    if tuple(destination.shape) != stored.shape:
        return f"{name}: the parameter is {list(destination.shape)}, the checkpoint has {list(stored.shape)}"
    allowed = _WIDER.get(stored.dtype, (TORCH_DTYPES[stored.dtype],))
    if destination.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        return f"{name}: the parameter is {destination.dtype}; {stored.dtype} of the checkpoint needs {names}"
    return None
