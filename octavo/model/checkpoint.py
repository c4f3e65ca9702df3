"""A checkpoint directory: its config, its tensors, and whether the two agree (spec/model.md 2)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from octavo.errors import OctavoError
from octavo.model.config import ModelConfig
from octavo.model.layout import TensorSpec, expected_tensors
from octavo.model.shard_header import Span
from octavo.model.shards import Shards


class Checkpoint:
    """``config.json`` and the safetensors files beside it.

    Opening reads the config and the index only; a file is opened when one of its tensors is needed.
    """

    def __init__(self, path: Path) -> None:
        """Raises :class:`~octavo.errors.UsageError` if ``path`` holds no checkpoint, :class:`OctavoError` if one that
        cannot be used."""
        self.path = path
        self.config = ModelConfig.from_path(path)
        self.expected = expected_tensors(self.config)
        self.shards = Shards(path)

    @property
    def files_opened(self) -> int:
        """How many safetensors files have been opened so far."""
        return self.shards.files_opened

    def problems(self) -> dict[str, list[str]]:
        """Everything in which the files differ from the layout, by kind. Opens all files, reads headers only."""
        spans_of, unusable = self._headers()
        missing = [name for name in self.expected if name not in self.shards.file_of]
        unexpected, misplaced, shapes, dtypes = [], [], [], []
        for name, file in self.shards.file_of.items():
            expected = self.expected.get(name)
            if expected is None:
                unexpected.append(name)
            elif file in spans_of and name not in spans_of[file]:
                misplaced.append(f"{name} in {file}")
            elif file in spans_of:
                stored = spans_of[file][name].spec
                if stored.shape != expected.shape:
                    shapes.append(f"{name}: {list(stored.shape)}, expected {list(expected.shape)}")
                if stored.dtype != expected.dtype:
                    dtypes.append(f"{name}: {stored.dtype}, expected {expected.dtype}")
        unnamed = [
            f"{name} in {file}"
            for file, spans in spans_of.items()
            for name in spans
            if self.shards.file_of.get(name) != file
        ]
        found = {
            "unusable files": unusable,
            "missing tensors": missing,
            "unexpected tensors": unexpected,
            "tensors that are not in the file that the index names": misplaced,
            "tensors that the index does not name": unnamed,
            "wrong shapes": shapes,
            "wrong dtypes": dtypes,
        }
        return {kind: items for kind, items in found.items() if items}

    def _headers(self) -> tuple[dict[str, dict[str, Span]], list[str]]:
        """The headers by file, and why the other files have none."""
        spans_of, unusable = {}, []
        for name in self.shards.files:
            try:
                spans_of[name] = self.shards.file(name).spans
            except OctavoError as error:
                unusable.append(str(error))
        return spans_of, unusable

    def check(self) -> None:
        """Raise one :class:`OctavoError` that lists every problem by name, if there is any."""
        problems = self.problems()
        if problems:
            raise OctavoError(
                f"{self.path} does not hold the checkpoint that its config.json describes:\n"
                + "\n".join(problem_lines(problems))
                + "\nCopy config.json, the index and all safetensors files from one complete checkpoint."
            )

    def stored(self, name: str) -> TensorSpec:
        """How ``name`` is stored. Raises :class:`OctavoError` unless that is as the config demands."""
        if name not in self.expected:
            raise OctavoError(f"{name}: no tensor of a checkpoint with this config.json")
        spec = self.shards.spec(name)
        if spec != self.expected[name]:
            raise OctavoError(f"{self.shards.locate(name).path}: {name} is {spec}, expected {self.expected[name]}")
        return spec

    def engram_table(self, layer: int) -> tuple[Tensor, Tensor]:
        """The n-gram table of an Engram layer: weight ``[rows, dim]`` float8_e4m3fn and scale ``[rows, dim/32]`` uint8
        (spec/model.md 3.11). Both are read-only views of mapped host memory, advised to be read at random; writing to
        one ends the process. Raises :class:`OctavoError` if the layer has no table.
        """
        views = []
        for name in self.engram_names(layer):
            self.stored(name)
            file = self.shards.locate(name)
            file.random_access(name)
            views.append(file.tensor(name))
        weight, scale = views
        return weight, scale

    def engram_names(self, layer: int) -> tuple[str, str]:
        """Names of weight and scale of a layer's table. Raises :class:`OctavoError` if it has none."""
        layers = self.config.text_config.engram_layer_ids
        if layer not in layers:
            raise OctavoError(f"layer {layer} has no Engram table; layers {list(layers)} have one")
        return f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"


def problem_lines(problems: dict[str, list[str]]) -> list[str]:
    """Each kind with its count, then every name: nothing is cut short."""
    lines = []
    for kind, items in problems.items():
        lines.append(f"  {kind} ({len(items)}):")
        lines.extend(f"    {item}" for item in items)
    return lines
