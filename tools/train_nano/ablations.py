"""What each part of the architecture is worth: the engine with one of them broken, on the suite meant to catch it.

``python -m tools.train_nano.ablations --model DIR --out FILE.json``. Operators are replaced where the modules call
them, with graphs off, so that everything else runs as it always does. A model that does not lose anything here would
not notice such a bug in an engine either.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.paging import ratio_of
from octavo.kernels.rope import turn
from octavo.kernels.select import visible_entries
from octavo.model.packaged import nano_path
from octavo.runtime.config import EngineConfig
from octavo.runtime.engine import Engine
from octavo.runtime.evaluate import generated_suites, run_suite

Function = Callable[..., Any]
Break = Callable[[Function], Function]
"""From an operator to a broken one."""


@dataclass(frozen=True, slots=True)
class Ablation:
    name: str
    suite: str
    breaks: dict[str, Break]
    """By name of the operator."""
    text_config: dict[str, Any]
    """Keys of the text configuration that change."""


def ablations(model: Path) -> list[Ablation]:
    """All of them, for the checkpoint in the directory ``model``."""
    text_config = json.loads((model / "config.json").read_text(encoding="utf-8"))["text_config"]

    def of(name: str, suite: str, breaks: dict[str, Break], **changes: Any) -> Ablation:
        return Ablation(name, suite, breaks, changes)

    sources = text_config["kv_source_layer_ids"]
    return [
        of("index selection random", "recall@1k", {"select": _random, "select_candidates": _random_first}),
        of("window halved", "arithmetic", {}, sliding_window=text_config["sliding_window"] // 2),
        of("Engram off", "facts", {"engram_gate": _streams_pass}),
        of("sink off", "arithmetic", {"attend": _without_sink}),
        *(
            of(f"entries of layer {layer} zeroed", "recall@1k", {"publish": _zeroed(place, len(sources))})
            for place, layer in enumerate(sources)
        ),
        # At 1k half of all blocks are candidates, at 4k an eighth.
        of("candidates wrong", "recall@4k", {"select_candidates": _wrong_candidates}),
        of("pending pair dropped", "recall@1k", {"publish": _without_pending}),
        of("rope off by one", "arithmetic", {"attend": _one_further}),
    ]


def _random(select: Function) -> Function:
    """As many entries as there should be, any of the visible ones."""
    return lambda *given: _any_of(_visible(given), select(*given))


def _random_first(select: Function) -> Function:
    def broken(*given: Any) -> tuple[Tensor, Tensor]:
        chosen, candidates = select(*given)
        return _any_of(_visible(given), chosen), candidates

    return broken


def _wrong_candidates(select: Function) -> Function:
    """As many blocks as there should be, any of the visible ones."""

    def broken(*given: Any) -> tuple[Tensor, Tensor]:
        chosen, candidates = select(*given)
        return chosen, _any_of(-(-_visible(given) // given[-1]), candidates)

    return broken


def _visible(given: tuple[Any, ...]) -> Tensor:
    """Entries that each row sees, from the arguments of a selection."""
    keys, positions = given[2], given[5]
    return visible_entries(positions, ratio_of(keys))


def _any_of(count: Tensor, like: Tensor) -> Tensor:
    """Distinct random numbers below count [R], ascending, as many as ``like`` [R, k] has, -1 padded."""
    most = max(int(count.max()), like.shape[1])
    generator = torch.Generator(device=like.device).manual_seed(int(count.sum()))
    draw = torch.rand(len(like), most, generator=generator, device=like.device)
    seen = torch.arange(most, device=like.device) < count.unsqueeze(1)
    order = draw.masked_fill(~seen, -1.0).topk(like.shape[1], dim=1).indices
    kept = torch.arange(like.shape[1], device=like.device) < (like >= 0).sum(1, keepdim=True)
    chosen = torch.where(kept, order, most).sort(1).values
    return chosen.masked_fill(chosen == most, -1).int()


def _streams_pass(gate: Function) -> Function:
    return lambda streams, *rest: streams.clone()


def _without_sink(attend: Function) -> Function:
    def broken(query: Tensor, latents: Tensor, ring: Tensor, sink: Tensor, *rest: Any) -> Tensor:
        attended: Tensor = attend(query, latents, ring, torch.full_like(sink, -1e30), *rest)
        return attended

    return broken


def _zeroed(place: int, sources: int) -> Break:
    """Entries of one source are zero; its index keys stay. Sources publish in their order, once a step."""

    def breaks(publish: Function) -> Function:
        calls = 0

        def broken(*arguments: Any) -> None:
            nonlocal calls
            publish(*arguments)
            if calls % sources == place:
                arguments[10].zero_()
            calls += 1

        return broken

    return breaks


def _without_pending(publish: Function) -> Function:
    """As if every token came in a step of its own, and no first half waited for its partner."""

    def broken(*arguments: Any) -> None:
        changed = list(arguments)
        positions, pending = arguments[7], arguments[12]
        changed[8] = positions
        if pending is not None:
            pending.zero_()
        publish(*changed)

    return broken


def _one_further(attend: Function) -> Function:
    """Queries turn by one position more than they should."""

    def broken(query: Tensor, latents: Tensor, ring: Tensor, sink: Tensor, frequencies: Tensor, *rest: Any) -> Tensor:
        once = torch.ones(len(query), device=query.device)
        attended: Tensor = attend(turn(query, once, frequencies), latents, ring, sink, frequencies, *rest)
        return attended

    return broken


@contextlib.contextmanager
def broken_kernels(ablation: Ablation) -> Iterator[None]:
    """The modules call the ablation's operators. Engines must run with graphs off."""
    with contextlib.ExitStack() as stack:
        for name, breaks in ablation.breaks.items():
            stack.enter_context(patch.object(kernels, name, breaks(kernels.OPERATORS[name])))
        yield


def accuracy(model: Path, suite: str, items: int, device: str, ablation: Ablation | None = None) -> float:
    """Share of right answers, with a part broken or whole."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if ablation is not None and ablation.text_config:
            model = changed_model(model, Path(folder) / "model", ablation.text_config)
        config = EngineConfig(model=model, device=device, graphs="off", max_requests=64, kv_tokens=300_000)
        engine = stack.enter_context(Engine(config))
        if ablation is not None:
            stack.enter_context(broken_kernels(ablation))
        (questions,) = generated_suites(suite, items, seed=0)
        return run_suite(engine, questions).accuracy


def changed_model(model: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint in the new directory ``folder``, with keys of its text configuration changed."""
    shutil.copytree(model, folder, copy_function=shutil.copyfile)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=nano_path(), help="Directory of a checkpoint of octavo-nano.")
    parser.add_argument("--items", type=int, default=100, help="Questions of each line, at least 1.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="Also write the table to this JSON file.")
    options = parser.parse_args()
    found = ablations(options.model)
    whole = {
        suite: accuracy(options.model, suite, options.items, options.device)
        for suite in dict.fromkeys(each.suite for each in found)
    }
    rows = []
    print(f"{'broken':<28} {'suite':<12} {'whole':>7} {'broken':>7} {'lost':>7}")
    for each in found:
        left = accuracy(options.model, each.suite, options.items, options.device, each)
        rows.append({"broken": each.name, "suite": each.suite, "whole": whole[each.suite], "left": left})
        lost = whole[each.suite] - left
        print(f"{each.name:<28} {each.suite:<12} {whole[each.suite]:>7.1%} {left:>7.1%} {lost:>7.1%}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"items": options.items, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
