"""Metrics in Prometheus' format, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from octavo.runtime.server.engine_interface import EngineState, RequestStream
from octavo.runtime.server.messages import Finished, Ready, Submit
from octavo.runtime.server.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "octavo.json"
READY = EngineState(
    phase="ready",
    detail="",
    ready=Ready(description="", max_model_len=99, max_requests=4, vocab_size=512, timeline=[("weights", 1.5)]),
)
STATS: dict[str, Any] = {
    **{"steps": 7, "rows": 70, "prompt_tokens": 60, "generated_tokens": 10, "preemptions": 1},
    **{"overlapped_steps": 6, "early_reads": 2, "rows_in_vain": 3},
    **{"running": 2, "waiting": 3, "slots": 4, "free_slots": 2, "pages": 9, "free_pages": 5},
    "finished": {"stop": 4, "length": 1},
    "seconds": {"schedule": 0.25, "run": 2.0},
    "replays": {8: 5, 16: 1},
    "not_replayed": {"beyond the largest bucket": 1},
}


def finished(**values: Any) -> Finished:
    usual: dict[str, Any] = {
        **{"id": "r", "index": 0, "reason": "stop", "error": None},
        **{"answer_tokens": 5, "queue_seconds": 0.02, "prefill_seconds": 0.03, "decode_seconds": 0.4},
    }
    return Finished(**(usual | {"preemptions": 0} | values))


def observed() -> Metrics:
    metrics = Metrics("octavo-nano")
    stream = RequestStream(Submit(id="r", prompts=[[1] * 30], params={"n": 3}), lambda index: None)
    stream.finished = [finished(), finished(index=1, answer_tokens=0), finished(index=2, answer_tokens=1)]
    metrics.observe_request("/v1/completions", 200, 0.5, stream)
    metrics.observe_request("/v1/completions", 400, 0.001, None)
    return metrics


def families(text: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    """Samples of a family by the values of their labels."""
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_everything_is_told() -> None:
    told = families(observed().render(READY, STATS))
    assert values(told["octavo_info"]).keys() == {("octavo-nano", "0.1.0")}
    assert values(told["octavo_engine_phase"])["ready",] == 1 and sum(values(told["octavo_engine_phase"]).values()) == 1
    assert values(told["octavo_start_seconds"]) == {("weights",): 1.5}
    assert values(told["octavo_http_requests"]) == {("/v1/completions", "200"): 1, ("/v1/completions", "400"): 1}
    assert values(told["octavo_answers"]) == {("stop",): 4, ("length",): 1}
    assert values(told["octavo_step_seconds"]) == {("schedule",): 0.25, ("run",): 2}
    assert values(told["octavo_replayed_steps"]) == {("8",): 5, ("16",): 1}
    assert values(told["octavo_eager_steps"]) == {("beyond the largest bucket",): 1}
    overlap = ("overlapped_steps", "early_reads", "rows_in_vain")
    for name in ("steps", "rows", "prompt_tokens", "generated_tokens", "preemptions", *overlap):
        assert (told[f"octavo_{name}"].type, values(told[f"octavo_{name}"])) == ("counter", {(): STATS[name]})
    for name in ("running", "waiting", "slots", "free_slots", "pages", "free_pages"):
        assert (told[f"octavo_{name}"].type, values(told[f"octavo_{name}"])) == ("gauge", {(): STATS[name]})


def test_times_of_answers() -> None:
    told = families(observed().render(READY, None))

    def count_and_sum(name: str) -> tuple[float, float]:
        samples = {sample.name: sample.value for sample in told[name].samples if "le" not in sample.labels}
        return samples[f"{name}_count"], round(samples[f"{name}_sum"], 6)

    assert count_and_sum("octavo_queue_seconds") == (3, 0.06)
    assert count_and_sum("octavo_time_to_first_token_seconds") == (2, 0.1), "one answer had no token"
    assert count_and_sum("octavo_time_per_output_token_seconds") == (1, 0.1), "one answer had more than one"
    assert count_and_sum("octavo_request_prompt_tokens") == (1, 30), "one prompt for all answers"
    assert count_and_sum("octavo_request_answer_tokens") == (3, 6)


def test_an_engine_that_says_nothing_still_has_a_phase() -> None:
    told = families(Metrics("octavo-nano").render(EngineState(phase="starting", detail="weights"), None))
    assert values(told["octavo_engine_phase"])["starting",] == 1
    assert "octavo_steps" not in told and "octavo_start_seconds" not in told


def test_dashboard_draws_metrics_that_exist() -> None:
    text = observed().render(READY, STATS).decode()
    there = set(re.findall(r"^([a-z_]+)[ {]", text, re.MULTILINE))
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    drawn = {name for expression in expressions for name in re.findall(r"(?:octavo|process)_[a-z_]+", expression)}
    assert drawn and drawn <= there, drawn - there
    engine = {
        name for name in there if name.startswith("octavo_") and not name.endswith(("_created", "_sum", "_count"))
    }
    assert engine <= drawn, f"not drawn: {engine - drawn}"
