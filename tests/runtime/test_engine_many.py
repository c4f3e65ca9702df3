"""The Python API with many answers: parameters, streams, interruption, numbers, asyncio, and two engines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from octavo import AsyncEngine, Engine, EngineConfig, Result, SamplingParams, UsageError
from octavo.runtime.assemble import plan
from octavo.runtime.pools import Storage
from tests.model.mini_run import MINI, golden

CONFIG = EngineConfig(model=MINI, device="cpu", kv_tokens=1024, max_requests=6)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(CONFIG) as running:
        yield running


def test_parameters_for_each_prompt(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=n) for n in (1, 2, 3)]
    results = engine.generate(["a", "b", "c"], params)
    assert [len(result.ids) for result in results] == [1, 2, 3]
    with pytest.raises(UsageError, match="2 sampling parameters for 3 prompts"):
        engine.generate(["a", "b", "c"], params[:2])


def test_more_prompts_than_slots(engine: Engine) -> None:
    """Twenty prompts in six slots, in the prompts' order, each as if it were alone; everything is back at the end."""
    prompts = [f"prompt number {n}" for n in range(20)]
    before = sum(engine.stats()["finished"].values())
    progress: list[tuple[int, int]] = []
    results = engine.generate(prompts, SamplingParams(max_tokens=3), lambda done, total: progress.append((done, total)))
    assert progress == [(n, 20) for n in range(1, 21)]
    assert [engine.tokenizer.decode(result.prompt_ids[1:]) for result in results] == prompts
    assert results[13].ids == engine.generate([prompts[13]], SamplingParams(max_tokens=3))[0].ids
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    sizes = engine.capacity.sizes
    assert (stats["free_slots"], stats["free_pages"]) == (sizes.slots, sizes.pages)
    assert sum(stats["finished"].values()) == before + 21


def test_n_answers(engine: Engine) -> None:
    """They differ, repeat with the seed, and the first is the lone one."""
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=11, n=4)
    first, second = engine.generate(["Once"], params)[0], engine.generate(["Once", "upon"], params)[0]
    assert [answer.ids for answer in first.answers] == [answer.ids for answer in second.answers]
    assert len({tuple(answer.ids) for answer in first.answers}) == 4
    (lone,) = engine.generate(["Once"], SamplingParams(max_tokens=6, temperature=1.0, seed=11))
    assert lone.ids == first.ids == first.answers[0].ids


def test_without_a_seed_answers_differ(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5)
    assert engine.generate(["Once"], params)[0].ids != engine.generate(["Once"], params)[0].ids


def test_stop_strings_and_ids(engine: Engine) -> None:
    (whole,) = engine.generate(["Hello"], SamplingParams(max_tokens=12))
    stop = whole.text[3:6]
    cut = whole.text.find(stop)
    (answer,) = engine.generate(["Hello"], SamplingParams(max_tokens=12, stop=(stop,)))
    assert (answer.text, answer.finish_reason, answer.answers[0].stop) == (whole.text[:cut], "stop", stop)
    token = whole.ids[4]
    (answer,) = engine.generate(["Hello"], SamplingParams(max_tokens=12, stop_token_ids=(token,)))
    assert answer.ids == whole.ids[: whole.ids.index(token) + 1] and answer.answers[0].stop == token
    assert whole.text.startswith(answer.text)


def test_logprobs_are_the_models() -> None:
    """In plain numerics against the goldens' logits, to 1e-4: they are F32 logits of size 10."""
    prefill, decode = golden("prefill", "plain"), golden("decode", "plain")
    prompt = prefill["p37.input_ids"].tolist()
    with Engine(
        EngineConfig(model=MINI, device="cpu", numerics="plain", chunk=10, kv_tokens=128, graphs="off")
    ) as engine:
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=3, logprobs=4, prompt_logprobs=2))
    expected = torch.log_softmax(prefill["p37.logits"].double(), 1)
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == 37
    for position, entry in enumerate(result.prompt_logprobs[1:], start=1):
        assert entry is not None and entry.id == prompt[position] and len(entry.top) == 2
        assert entry.logprob == pytest.approx(float(expected[position - 1, entry.id]), abs=1e-4)
        assert entry.top[0][1] == pytest.approx(float(expected[position - 1].max()), abs=1e-4)
    logprobs = result.answers[0].logprobs
    assert logprobs is not None and [entry.id for entry in logprobs] == result.ids
    rows = torch.log_softmax(torch.cat((prefill["p37.logits"][-1:], decode["logits"][:2])).double(), 1)
    for entry, row in zip(logprobs, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.id]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(4).indices.tolist()


def test_interrupted_generate_returns_what_there_is(engine: Engine) -> None:
    """As by Ctrl-C, when the first answer is finished."""

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=400, ignore_eos=True)]
    results = engine.generate(["short", "long"], params, interrupt)
    assert [result.finish_reason for result in results] == ["length", "abort"]
    assert 1 <= len(results[1].ids) < 400
    assert engine.generate(["short"], params[0])[0].ids == results[0].ids


def test_aborted_stream(engine: Engine) -> None:
    stream = engine.stream("Hello", SamplingParams(max_tokens=400, ignore_eos=True))
    first = next(stream)
    stream.abort()
    *_, last = stream
    assert last.answer is not None and last.answer.finish_reason == "abort"
    assert first.id == last.answer.ids[0]
    assert engine.stats()["running"] == 0


def test_timeout_ends_the_answer_as_it_is(engine: Engine) -> None:
    (result,) = engine.generate(["Hello"], SamplingParams(max_tokens=900, ignore_eos=True, timeout=0.5))
    assert result.finish_reason == "timeout" and 0 < len(result.ids) < 900


def test_a_failing_mask_disturbs_no_other(engine: Engine) -> None:
    def mask(answer: object) -> torch.Tensor:
        raise RuntimeError("no grammar")

    bad = SamplingParams(max_tokens=4, token_mask=mask)
    results = engine.generate(["one", "two"], [SamplingParams(max_tokens=4), bad])
    assert results[1].finish_reason == "error" and results[1].answers[0].error == "RuntimeError: no grammar"
    assert results[0].ids == engine.generate(["one"], SamplingParams(max_tokens=4))[0].ids


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=(512,)), "stop_token_ids 512"),
        (SamplingParams(logit_bias={600: 1.0}), "logit_bias 600"),
    ],
)
def test_ids_outside_the_vocabulary(engine: Engine, params: SamplingParams, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.generate(["x"], params)


def test_two_engines_in_one_process(engine: Engine) -> None:
    config = EngineConfig(weights="random", preset="mini", device="cpu", numerics="plain", kv_tokens=128)
    params = SamplingParams(max_tokens=5)
    with Engine(config) as other:
        streams = [engine.stream("abc", params), other.stream("abc", params)]
        answers = [[delta.id for delta in stream] for stream in streams]
        assert answers[1] == other.generate(["abc"], params)[0].ids
    assert answers[0] == engine.generate(["abc"], params)[0].ids


def test_async_engine(engine: Engine) -> None:
    """Concurrent streams and a cancelled one; answers as in the synchronous engine."""
    params = SamplingParams(max_tokens=5)

    async def work() -> tuple[list[Result], list[int | None], dict[str, object]]:
        async with AsyncEngine(CONFIG) as running:
            results = await running.generate(["abc", "def", "ghi"], params)
            ids = [delta.id async for delta in running.stream("abc", params)]
            async for _ in running.stream("abc", SamplingParams(max_tokens=500, ignore_eos=True)):
                break
            for _ in range(100):
                if running.stats()["running"] == 0:
                    break
                await asyncio.sleep(0.05)
            return results, ids, running.stats()

    results, ids, stats = asyncio.run(work())
    expected = engine.generate(["abc", "def", "ghi"], params)
    assert [result.ids for result in results] == [result.ids for result in expected]
    assert ids == expected[0].ids
    assert stats["running"] == 0
    finished = stats["finished"]
    assert isinstance(finished, dict) and finished["abort"] == 1 and sum(finished.values()) == 5


def test_what_fits() -> None:
    """890 bytes a token at the released sizes, 3,200 in BF16; from a token count or from free memory."""
    released = EngineConfig(weights="random", preset="slice", device="cpu", kv_tokens=100_000, max_requests=4)
    capacity = plan(released).capacity
    assert capacity.page_bytes == 890 * 64 and capacity.storage is Storage.PACKED
    assert capacity.tokens == 100_032 and capacity.max_model_len == 100_000
    assert "100,032 tokens at 890 bytes each (packed) and 4 requests" in capacity.describe()
    window = 40 * 128 * 512 * 2 + 3 * 2 * 512 * 4
    history = 3 * 8
    assert capacity.request_bytes == window + 4 * -(-1_048_576 // 64) + history
    assert plan(replaced(released, kv_storage="bf16")).capacity.page_bytes == 3200 * 64

    half = plan(EngineConfig(model=MINI, device="cpu", memory_fraction=0.5, max_requests=2)).capacity
    assert half.tokens == 2 * 65_536, "as much as two requests of the longest kind can use"
    assert plan(EngineConfig(model=MINI, device="cpu", max_model_len=100)).capacity.sizes.max_pages == 2


def replaced(config: EngineConfig, **changes: object) -> EngineConfig:
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return EngineConfig(**(fields | changes))
