"""What an engine is started with; the command line is generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.errors import UsageError

GraphMode = Literal["on", "off", "eager", "compare", "poison"]
"""How steps are run; see ``EngineConfig.graphs``."""


def option(help_text: str, default: Any) -> Any:
    """A field that is a command-line option, with its help text; fields made otherwise are for Python alone."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Where the weights come from, where they go, and how much state is kept.

    Raises :class:`UsageError` for values that no engine can have.
    """

    model: Path | None = option(
        "Directory of a checkpoint in the official layout. Default: octavo-nano, which comes with Octavo.", None
    )
    weights: Literal["checkpoint", "random"] = option(
        "Read weights from --model, or make random ones of a --preset on the device, without a file.", "checkpoint"
    )
    preset: str | None = option("Configuration of random weights: tiny, mini, slice or released.", None)
    layers: int | None = option("Keep the first N layers only.", None)
    experts: int | None = option(
        "Keep the first N routed experts of each layer; rows routed to others skip them. Default: all, 48 in slice.",
        None,
    )
    weights_seed: int = option("Seed of random weights.", 0)
    device: str = option("cpu, cuda, cuda:N, or auto: cuda where there is one.", "auto")
    numerics: Literal["auto", "reference", "fast", "plain"] = option(
        "reference: the official rounding points, row-invariant. fast: the same quantisers, products summed as the "
        "device likes. plain: F32 without quantisation, for comparison. auto: fast on CUDA, reference on the CPU.",
        "auto",
    )
    engram: Literal["auto", "device", "host", "mmap"] = option(
        "Where the Engram tables lie. mmap: in the checkpoint's files, which all ranks of a host map; then a GPU waits "
        "for the host at every step. host: copied to memory that the ranks of a host share, and that GPUs read by "
        "themselves. device: on the device of every rank. auto: host on CUDA, mmap on the CPU, and device for random "
        "weights.",
        "auto",
    )
    bf16_weights: Literal["auto", "on", "off"] = option(
        "Hold the dense F8 weights (all but routed experts) in BF16 too: steps of many rows multiply by those, and "
        "convert none at every use. Takes twice the bytes of the F8 ones on every rank. auto: on for fast numerics on "
        "CUDA.",
        "auto",
    )
    ranks: int = option("Processes that share every step: rows and experts are dealt over them.", 1)
    expert_placement: Literal["sharded", "replicated"] = option(
        "sharded: of the routed experts every rank holds a part and computes it for all rows. replicated: every rank "
        "holds all of them and computes its own rows, so that less moves between ranks.",
        "sharded",
    )
    collectives: Literal["between", "captured"] = option(
        "between: every collective is an instruction of its own between captured segments. captured: part of a "
        "segment's CUDA graph, if all ranks find at start that NCCL can be captured and replayed.",
        "between",
    )
    chunk: int = option("Most rows that one step computes; longer prompts take several steps.", 8192)
    max_requests: int = option("Requests in work at once; more wait.", 256)
    max_model_len: int | None = option("Longest prompt and answer together. Default: what model and room allow.", None)
    kv_tokens: int | None = option("Tokens of state, of all requests together. Default on the CPU: 65536.", None)
    memory_fraction: float | None = option(
        "Share of the free device memory for state, instead of --kv-tokens. Default on CUDA: 0.85.", None
    )
    kv_storage: Literal["packed", "bf16"] = option(
        "Entries as 4-bit codes or as BF16 values: the same numbers. Plain numerics keep F32.", "packed"
    )
    graphs: GraphMode = option(
        "Run steps as compiled programs on static buffers (on), as plain calls (off), or to debug: without buffers "
        "(eager), both ways instruction by instruction (compare), with NaN in everything unwritten (poison).",
        "on",
    )
    compile: Literal["auto", "inductor", "none"] = option(
        "Compile the insides of operators with Inductor, for fast numerics alone (inductor), or call them as they are "
        "(none). auto: inductor for fast numerics on CUDA.",
        "auto",
    )
    buckets: str = option("Row counts to prepare programs for: default, dense, or such as 1,8,64.", "default")
    overlap: Literal["auto", "on", "off"] = option(
        "Launch a step before the tokens of the one before are read (on), so that a GPU need not wait for the host, or "
        "after that (off). auto: on for one rank on CUDA.",
        "auto",
    )
    dump_dir: Path | None = option(
        "Write how the model was compiled to this directory, and a line for every step to its replay.jsonl.", None
    )
    step_deadline: float = option("Seconds after which a step counts as hung and the engine ends.", 600.0)

    def __post_init__(self) -> None:
        if self.model is not None:
            object.__setattr__(self, "model", Path(self.model))  # a str is welcome too
        if self.dump_dir is not None:
            object.__setattr__(self, "dump_dir", Path(self.dump_dir))
            if self.graphs == "off":
                raise UsageError("--dump-dir writes how the model was compiled, and --graphs off compiles nothing")
        for name in ("layers", "experts", "chunk", "max_requests", "ranks"):
            self._check(name, 1, 1 << 40, "must be at least 1")
        self._check("kv_tokens", 2, 1 << 40, "must be at least 2, a prompt token and an answer token")
        self._check("max_model_len", 2, 1 << 40, "must be at least 2, a prompt token and an answer token")
        self._check("memory_fraction", 0.01, 1.0, "must be from 0.01 to 1")
        self._check("step_deadline", 0.001, 1e9, "must be above 0 seconds")
        if self.overlap == "on" and self.ranks > 1:
            raise UsageError(
                f"--overlap on with --ranks {self.ranks}: only rank 0 knows what has been drawn, so steps of several "
                "ranks do not overlap. Use --overlap off or auto, or one rank."
            )
        if self.kv_tokens is not None and self.memory_fraction is not None:
            raise UsageError("--kv-tokens and --memory-fraction both size the state: give one of them")
        if self.weights == "checkpoint" and self.preset is not None:
            raise UsageError("--preset goes with --weights random; --model PATH names a checkpoint to read")
        if self.weights == "random" and (self.preset is None or self.model is not None):
            raise UsageError("--weights random takes --preset NAME (tiny, mini, slice or released) and no --model")
        if self.weights == "random" and self.engram == "mmap":
            raise UsageError("--engram mmap maps a checkpoint's files; --weights random has none: use host or device")

    def _check(self, name: str, low: float, high: float, rule: str) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"--{name.replace('_', '-')} {value}: {rule}")
