"""What a checkpoint holds, in numbers: the content of ``octavo checkpoint inspect``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import OctavoError
from octavo.model.checkpoint import Checkpoint, problem_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """Counts come from the files' headers, the rest from ``config.json``."""

    path: Path
    shards: int
    tensors: int
    bytes_by_dtype: dict[str, int]
    """Payload bytes by safetensors dtype, largest first."""
    parameters: int
    """Logical parameters; scales are not counted."""
    layers: int
    experts: int
    """Routed experts a layer."""
    draft_stages: int
    draft_experts: int
    """Routed experts a draft stage."""
    vision_layers: int
    engram_rows: dict[int, int]
    """Rows of the n-gram table of each Engram layer."""
    problems: dict[str, list[str]]
    """As of :meth:`Checkpoint.problems`; empty if the checkpoint is complete."""

    @property
    def payload_bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


def inspect(path: Path) -> CheckpointReport:
    """Read config, index and all headers of the checkpoint in ``path``; no tensor is read.

    Damaged files and tensors that differ from the layout are reported, not raised. Raises
    :class:`~octavo.errors.UsageError` or :class:`OctavoError` if config or index cannot be used.
    """
    checkpoint = Checkpoint(path)
    problems = checkpoint.problems()
    tensors, parameters, sizes = 0, 0, Counter[str]()
    for name in checkpoint.shards.files:
        try:
            spans = checkpoint.shards.file(name).spans
        except OctavoError:
            continue  # already among the problems
        tensors += len(spans)
        for span in spans.values():
            sizes[span.spec.dtype] += span.spec.nbytes
            parameters += span.spec.parameters
    text, vision = checkpoint.config.text_config, checkpoint.config.vision_config
    return CheckpointReport(
        path=path,
        shards=len(checkpoint.shards.files),
        tensors=tensors,
        bytes_by_dtype=dict(sizes.most_common()),
        parameters=parameters,
        layers=text.num_hidden_layers,
        experts=text.n_routed_experts,
        draft_stages=text.num_nextn_predict_layers,
        draft_experts=text.dspark_n_routed_experts,
        vision_layers=vision.num_hidden_layers if vision is not None else 0,
        engram_rows=dict(zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True)),
        problems=problems,
    )


def report_lines(report: CheckpointReport) -> list[str]:
    """The report as plain text."""
    count = sum(len(items) for items in report.problems.values())
    engram = ", ".join(f"layer {layer}: {rows:,} rows" for layer, rows in report.engram_rows.items())
    rows = [
        ("checkpoint", str(report.path)),
        ("tensors", f"{report.tensors:,} in {report.shards} file{'' if report.shards == 1 else 's'}"),
        ("payload", f"{report.payload_bytes:,} bytes"),
        *((f"  {dtype}", f"{size:,} bytes") for dtype, size in report.bytes_by_dtype.items()),
        ("parameters", f"{report.parameters:,} (scales not counted)"),
        ("layers", f"{report.layers}, {report.experts} experts each"),
        (
            "drafts",
            f"{report.draft_stages} stages, {report.draft_experts} experts each" if report.draft_stages else "none",
        ),
        ("vision", f"{report.vision_layers} layers" if report.vision_layers else "none"),
        ("Engram", engram or "none"),
        ("problems", str(count) if count else "none"),
    ]
    return [f"{label:<12}{value}" for label, value in rows] + problem_lines(report.problems)
