"""The safetensors files of a checkpoint: which file holds a tensor, and tensors as views of memory-mapped bytes.

The ``safetensors`` library maps files too, but its mapping cannot be reached: pages that were copied stay resident
until the file is closed (a shard is as large as a layer), random access cannot be announced for the Engram tables, and
its private writable mapping of a 98 GB file is refused on a smaller machine. So bytes come from ``mmap`` here. Writing
goes through the library.
"""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import OctavoError, UsageError
from octavo.model.layout import TensorSpec
from octavo.model.shard_header import DAMAGED, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""How the stored types of the layout come out. Scales and F4 codes are bit patterns, hence uint8."""


class ShardFile:
    """One mapped safetensors file. Its tensors are read-only views: writing to one ends the process."""

    def __init__(self, path: Path) -> None:
        """Map ``path`` and parse its header. Raises :class:`OctavoError` naming the file and the tensor at fault."""
        self.path = path
        self.spans = read_header(path)
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise OctavoError(f"{path}: cannot be mapped into memory ({error.strerror})") from error
        with warnings.catch_warnings():
            # PyTorch has no read-only tensors, and warns. Views leave this room as Engram tables only.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def tensor(self, name: str) -> Tensor:
        """The tensor as a view of the mapping, in the dtype of :data:`TORCH_DTYPES`."""
        span = self.spans[name]
        dtype = TORCH_DTYPES[span.spec.dtype]
        data = self._bytes[span.start : span.stop]
        if span.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(span.spec.shape)

    def will_need(self, name: str) -> None:
        """Ask the system to start reading the tensor from storage."""
        span = self.spans[name]
        self._advise(mmap.MADV_WILLNEED, span.start, span.stop)

    def random_access(self, name: str) -> None:
        """Announce that the tensor is read in random places: no read-ahead."""
        span = self.spans[name]
        self._advise(mmap.MADV_RANDOM, span.start, span.stop)

    def release(self) -> None:
        """Drop all pages of the file from resident memory; they can be read again.

        All, because the system maps more than what was read, before it and after it.
        """
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def _advise(self, advice: int, start: int, stop: int) -> None:
        if stop > start:
            first = start - start % mmap.PAGESIZE
            self._mapping.madvise(advice, first, stop - first)


class Shards:
    """All tensors of a checkpoint directory by name. A file is opened when one of its tensors is first asked for."""

    def __init__(self, directory: Path) -> None:
        """Read the index or, without one, the header of the only file."""
        self.directory = directory
        self._open: dict[str, ShardFile] = {}
        if (directory / INDEX_FILE).is_file():
            self.file_of: Mapping[str, str] = _read_index(directory / INDEX_FILE)
        elif (directory / SINGLE_FILE).is_file():
            self.file_of = dict.fromkeys(self.file(SINGLE_FILE).spans, SINGLE_FILE)
        else:
            raise UsageError(
                f"{directory}: neither {INDEX_FILE} nor {SINGLE_FILE} there. --model takes a directory that holds "
                "the safetensors files beside config.json."
            )

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files, sorted, open or not."""
        return tuple(sorted(set(self.file_of.values())))

    @property
    def files_opened(self) -> int:
        return len(self._open)

    def file(self, name: str) -> ShardFile:
        """The file called ``name``. Raises :class:`OctavoError` if it is missing or damaged."""
        if name not in self._open:
            path = self.directory / name
            if not path.is_file():
                raise OctavoError(f"{path}: missing, though {INDEX_FILE} names it. Download or copy it.")
            self._open[name] = ShardFile(path)
        return self._open[name]

    def locate(self, tensor: str) -> ShardFile:
        """The file that holds ``tensor``. Raises :class:`OctavoError` if there is none, or if the index is wrong."""
        if tensor not in self.file_of:
            raise OctavoError(f"{self.directory}: the checkpoint has no tensor {tensor}")
        file = self.file(self.file_of[tensor])
        if tensor not in file.spans:
            raise OctavoError(
                f"{file.path}: no tensor {tensor} there, though {INDEX_FILE} says so. Index and files are of "
                "different checkpoints: copy both from one."
            )
        return file

    def spec(self, tensor: str) -> TensorSpec:
        return self.locate(tensor).spans[tensor].spec


def _read_index(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OctavoError(f"{path}: not valid JSON ({error}). {DAMAGED}") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise OctavoError(f"{path}: no weight_map, the object that gives each tensor its file. {DAMAGED}")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise OctavoError(f"{path}: weight_map[{tensor!r}] is {file!r}; expected the name of a file beside it")
    return weight_map
