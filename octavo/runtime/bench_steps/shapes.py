"""Which steps are measured, and a configuration with room for them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from octavo.errors import UsageError
from octavo.graphs.buckets import check_buckets
from octavo.kernels.paging import PAGE_TOKENS, pages_for
from octavo.runtime.assemble import plan
from octavo.runtime.config import EngineConfig
from octavo.runtime.floor import StepShape

Kind = Literal["prefill", "decode"]
SIZE_OPTION: dict[Kind, str] = {"prefill": "--rows", "decode": "--batch"}
_UNUSED = ("graphs", "buckets", "dump_dir", "ranks", "max_requests")


def step_shapes(kind: Kind, sizes: str, contexts: str, chunk: int) -> tuple[StepShape, ...]:
    """All sizes at every context. ``prefill``: rows of one request, of which the last samples; ``decode``: requests,
    each with a row that samples. Raises :class:`UsageError` for lists that are none, and sizes that no step has."""
    option = SIZE_OPTION[kind]
    try:
        found = check_buckets([int(part) for part in sizes.split(",")], chunk)
    except ValueError as error:
        reason = str(error) if isinstance(error, UsageError) else "expected ascending numbers such as 1,16,128"
        raise UsageError(f"{option} {sizes}: {reason}") from error
    try:
        lengths = [int(part) for part in contexts.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 0 or lengths != sorted(set(lengths)):
        raise UsageError(f"--context {contexts}: expected ascending numbers of tokens from 0 on, such as 0,32768")
    return tuple(_shape(kind, size, context) for context in lengths for size in found)


def _shape(kind: Kind, size: int, context: int) -> StepShape:
    if kind == "prefill":
        return StepShape(rows=size, requests=1, context=context, sampled=1)
    return StepShape(rows=size, requests=size, context=context, sampled=size)


def tokens_of(shape: StepShape) -> int:
    """Of each request, after the step."""
    return shape.context + shape.each


def with_room(config: EngineConfig, kind: Kind, shapes: tuple[StepShape, ...]) -> EngineConfig:
    """The configuration with state for every one of the steps, unless it says how much state there is.

    Raises :class:`UsageError` for options that this measurement has no use for, or for too little room.
    """
    default = EngineConfig()
    given = dataclasses.asdict(config)
    for name in _UNUSED:
        if given[name] != dataclasses.asdict(default)[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply: bench {kind} prepares what it measures, steps of one rank "
                f"at the sizes of {SIZE_OPTION[kind]}, and writes no dump. Leave it out."
            )
    config = dataclasses.replace(config, max_requests=max(shape.requests for shape in shapes))
    needed = max(shape.requests * pages_for(tokens_of(shape)) for shape in shapes) * PAGE_TOKENS
    if config.kv_tokens is None and config.memory_fraction is None:
        config = dataclasses.replace(config, kv_tokens=needed)
    capacity = plan(config).capacity
    longest = max(map(tokens_of, shapes))
    if capacity.max_model_len < longest:
        raise UsageError(
            f"{SIZE_OPTION[kind]} and --context: a request has room for {capacity.max_model_len} tokens, and {longest} "
            "are asked for. Raise --kv-tokens, --memory-fraction or --max-model-len, or ask for less."
        )
    if capacity.tokens < needed:
        raise UsageError(
            f"{SIZE_OPTION[kind]} and --context: there is room for {capacity.tokens} tokens in all, and {needed} are "
            "asked for. Raise --kv-tokens or --memory-fraction, or ask for less."
        )
    return config
