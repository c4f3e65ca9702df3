"""The Python API: one request at a time, on the golden mini checkpoint and on random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo import Engine, EngineConfig, EngineFailure, OctavoError, SamplingParams, UsageError
from octavo.model.initialise import init_checkpoint
from octavo.runtime.tokenizer import IncrementalDecoder
from tests.model.mini_run import MINI, golden


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(model=MINI, device="cpu", kv_tokens=200, graphs="off")) as running:
        yield running


def test_greedy_answer_is_the_golden_one() -> None:
    """In plain numerics, where the goldens have no ties; the prompt crosses two chunks."""
    prompt = golden("prefill", "plain")["p37.input_ids"].tolist()
    with Engine(EngineConfig(model=MINI, device="cpu", numerics="plain", chunk=20)) as engine:
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=25))
    assert answer.ids == golden("decode", "plain")["generated"].tolist()
    assert (answer.answers[0].prompt_tokens, answer.finish_reason) == (37, "length")


def test_chunk_size_changes_nothing() -> None:
    answers = []
    for chunk in (1, 5, 8192):
        with Engine(EngineConfig(model=MINI, device="cpu", chunk=chunk, graphs="off")) as engine:
            answers += engine.generate(["The quick brown fox"], SamplingParams(max_tokens=8))
    assert {tuple(answer.ids) for answer in answers} == {tuple(answers[0].ids)}


def test_stream_concatenates_to_the_answer(engine: Engine) -> None:
    deltas = list(engine.stream("Hello", SamplingParams(max_tokens=12)))
    answer = deltas[-1].answer
    assert answer is not None and not any(delta.answer for delta in deltas[:-1])
    assert "".join(delta.text for delta in deltas) == answer.text
    assert [delta.id for delta in deltas] == answer.ids
    decoder = IncrementalDecoder(engine.tokenizer)
    assert answer.text == "".join(map(decoder.push, answer.ids)) + decoder.finish()


def test_prompt_kinds(engine: Engine) -> None:
    """Text gets a beginning of sentence, ids are taken as they are, messages go through the official template."""
    ids = engine.encode("Hello")
    assert ids[0] == engine.model_config.bos_token_id and engine.tokenizer.decode(ids[1:]) == "Hello"
    assert engine.encode(ids) == ids
    chat = engine.encode([{"role": "user", "content": "Hello"}])
    assert engine.tokenizer.decode(chat).endswith("<think>")
    answers = engine.generate([ids, "Hello"], SamplingParams(max_tokens=4))
    assert answers[0].ids == answers[1].ids


def test_requests_do_not_see_each_other(engine: Engine) -> None:
    """State that a request left in the pools is never read by the next one."""
    first = engine.generate(["abc"], SamplingParams(max_tokens=6))
    engine.generate(["quite another and much longer prompt " * 3], SamplingParams(max_tokens=6))
    assert engine.generate(["abc"], SamplingParams(max_tokens=6))[0].ids == first[0].ids


def test_end_of_sentence_ends_the_answer(engine: Engine) -> None:
    """Biased to come at once; ignored on request, and then as ordinary text."""
    eos = engine.model_config.eos_token_id
    certain = {eos: 100.0}
    (answer,) = engine.generate(["abc"], SamplingParams(max_tokens=10, logit_bias=certain))
    assert (answer.ids, answer.text, answer.finish_reason, answer.answers[0].stop) == ([eos], "", "stop", eos)
    (answer,) = engine.generate(["abc"], SamplingParams(max_tokens=3, logit_bias=certain, ignore_eos=True))
    assert (answer.ids, answer.finish_reason) == ([eos] * 3, "length")
    (answer,) = engine.generate(["abc"], SamplingParams(max_tokens=5, logit_bias=certain, min_tokens=2))
    assert len(answer.ids) == 3 and eos not in answer.ids[:2] and answer.ids[2] == eos


def test_room_for_state_ends_the_answer(engine: Engine) -> None:
    prompt = [3] * (engine.max_model_len - 3)
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=50))
    assert (len(answer.ids), answer.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([3] * 200, "room for 200"),
        ([3, 512], "512: token ids are integers from 0 to 511"),
        ([-1], "-1: token ids are integers"),
        ([True], "True: token ids are integers"),
        ([{"role": "nobody", "content": "x"}], "not valid"),
    ],
)
def test_bad_prompts(engine: Engine, prompt: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.generate([prompt])  # type: ignore[list-item]


def test_a_string_is_not_a_list_of_prompts(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"generate\(\[prompt\]\)"):
        engine.generate("Hello")


@pytest.mark.parametrize("field", [{"max_tokens": 0}, {"temperature": -0.1}, {"n": 65}, {"logprobs": 21}])
def test_bad_sampling_params(field: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(field))):
        SamplingParams(**field)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": MINI, "preset": "mini"}, "--preset goes with --weights random"),
        ({"weights": "random"}, "takes --preset"),
        ({"weights": "random", "preset": "mini", "model": MINI}, "no --model"),
        ({"model": MINI, "chunk": 0}, "--chunk 0"),
        ({"model": MINI, "kv_tokens": -1}, "--kv-tokens -1"),
        ({"model": MINI, "max_requests": 0}, "--max-requests 0"),
        ({"model": MINI, "memory_fraction": 1.5}, "--memory-fraction 1.5"),
        ({"model": MINI, "memory_fraction": 0.5, "kv_tokens": 64}, "give one of them"),
    ],
)
def test_bad_configs(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": Path("nowhere")}, UsageError, "no config.json"),
        ({"weights": "random", "preset": "huge"}, UsageError, "no preset 'huge'"),
        ({"model": MINI, "layers": 11}, UsageError, "choose 1 to 10"),
        ({"model": MINI, "experts": 9}, UsageError, "the model has 8"),
        ({"model": MINI, "device": "tpu"}, UsageError, "expected auto, cpu, cuda"),
        ({"model": MINI, "device": "meta"}, UsageError, "expected auto, cpu, cuda"),
        ({"weights": "random", "preset": "released", "device": "cpu"}, OctavoError, "GiB are needed"),
    ],
)
def test_engines_that_cannot_start(fields: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Engine(EngineConfig(**fields))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so it is not missing")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(OctavoError, match="this machine has 0 CUDA devices"):
        Engine(EngineConfig(model=MINI, device="cuda"))


def test_closed_engine(engine: Engine) -> None:
    with Engine(EngineConfig(weights="random", preset="mini", layers=1, device="cpu", graphs="off")) as other:
        pass
    with pytest.raises(EngineFailure, match="closed"):
        other.generate(["abc"])
    other.close()


def test_random_weights_equal_the_checkpoint_of_their_seed(tmp_path: Path) -> None:
    init_checkpoint("mini", tmp_path, seed=4)
    configs = [
        EngineConfig(model=tmp_path, device="cpu", graphs="off"),
        EngineConfig(weights="random", preset="mini", weights_seed=4, device="cpu", graphs="off"),
    ]
    answers = []
    for config in configs:
        with Engine(config) as engine:
            answers += engine.generate(["abc"], SamplingParams(max_tokens=6))
    assert answers[0].ids == answers[1].ids


def test_subset_of_layers_and_experts() -> None:
    """Fewer layers than the drafts target, and rows routed to experts that are not resident."""
    with Engine(EngineConfig(model=MINI, layers=5, experts=3, device="cpu", graphs="compare")) as engine:
        assert "5 layers, 3 of 8 experts" in engine.describe()
        (answer,) = engine.generate(["abc"], SamplingParams(max_tokens=4))
    assert len(answer.ids) == 4
