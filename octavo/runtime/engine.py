"""The Python interface: prompts in, answers out, many at once."""

from __future__ import annotations

import contextlib
import functools
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from octavo.errors import UsageError
from octavo.graphs.dump import claim
from octavo.runtime.answer_text import AnswerText
from octavo.runtime.assemble import Progress, assemble, choose_overlap
from octavo.runtime.config import EngineConfig
from octavo.runtime.core import EngineCore
from octavo.runtime.logprobs import TokenLogprob
from octavo.runtime.loop import EngineFailure, EngineLoop
from octavo.runtime.prompt import encode_chat
from octavo.runtime.ranks.launch import Others, start_others
from octavo.runtime.ranks.leader import Leader
from octavo.runtime.ranks.start import follow, rank_runner, with_common_capacity
from octavo.runtime.ranks.traffic import Traffic
from octavo.runtime.rehearsal import with_measured_capacity
from octavo.runtime.request import Answer, Delta, FinishReason, Request
from octavo.runtime.runner import Runner
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler
from octavo.runtime.step_program import ladders
from octavo.runtime.token_ids import check_params_ids, check_prompt_ids

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text to continue, token ids, or chat messages (``{"role": "user", "content": "..."}``, ...)."""

Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or one for each."""


@dataclass(frozen=True, slots=True)
class Result:
    """The answers to one prompt; text, ids and finish_reason are the first answer's."""

    prompt_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    """One a prompt token, None for the first; if asked for."""
    answers: list[Answer]

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def ids(self) -> list[int]:
        return self.answers[0].ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.answers[0].finish_reason


class EngineBase:
    """What the synchronous and the asynchronous engine share: start, encoding, submission, numbers."""

    def __init__(self, config: EngineConfig | str | Path | None = None, progress: Progress | None = None) -> None:
        """Load the weights and compile; ``progress(phase, done, total)`` hears of it. Raises :class:`OctavoError`."""
        if not isinstance(config, EngineConfig):
            config = EngineConfig(model=None if config is None else Path(config))
        self.config = config
        buckets = ladders(config.buckets, config.chunk, config.max_requests, config.ranks)
        self._leader: Leader | None = None
        self._traffic: Traffic | None = None
        others = start_others(self.config, follow)
        try:
            self._start(buckets, others, progress)
        except BaseException as error:
            if others is None:
                raise
            cause = others.explain(error) if isinstance(error, Exception) else error
            others.stop(force=True)
            raise cause from error

    def _start(self, buckets: Mapping[bool, tuple[int, ...]], others: Others | None, progress: Progress | None) -> None:
        """Load, get ready, and begin to listen."""
        began = time.perf_counter()
        if self.config.dump_dir is not None:
            claim(self.config.dump_dir)
        assembled = assemble(self.config, progress)
        loaded = time.perf_counter()
        assembly = with_measured_capacity(assembled, self.config)
        if others is not None:
            assembly = with_common_capacity(assembly, self.config)
        measured = time.perf_counter()
        self.tokenizer = assembly.tokenizer
        self.model_config = assembly.config
        self.capacity = assembly.capacity
        self._description = assembly.describe(self.config)
        scheduler = Scheduler(
            slots=self.capacity.sizes.slots,
            pages=self.capacity.sizes.pages,
            row_budget=self.config.chunk,
            max_length=self.capacity.max_model_len,
        )
        compiled = functools.partial(progress, "programs") if progress is not None else None
        if others is None:
            runner = Runner(assembly, buckets, self.config.graphs, self.config.dump_dir, compiled)
        else:
            self._traffic = Traffic()
            runner = rank_runner(assembly, self.config, compiled, self._traffic)
            self._leader = Leader(runner, others)
        ready = time.perf_counter()
        self._programs = runner.programs
        self._description += f"\n{self._programs.description}"
        self.timeline = [
            ("weights, tokenizer", loaded - began),
            *([("rehearsal of a step", measured - loaded)] if assembly is not assembled else []),
            ("pools", ready - measured - sum(seconds for _, seconds in self._programs.timeline)),
            *self._programs.timeline,
        ]
        """Phases of the start and their seconds; together all of it."""
        waits_for = others.stopped if others is not None else str
        overlap = choose_overlap(self.config, assembly.device)
        core = EngineCore(scheduler, self._leader or runner, overlap=overlap)
        self._loop = EngineLoop(core, self.config.step_deadline, waits_for)
        if others is not None:
            others.on_failure(lambda failure: self._loop.fail(EngineFailure(f"The engine ended: {failure}")))

    def _close(self) -> None:
        self._loop.close()
        if self._leader is not None:
            self._leader.close()
        self._programs.close()

    def describe(self) -> str:
        """What is loaded, where, in which numeric mode, and what fits."""
        return self._description

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.capacity.max_model_len

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises :class:`UsageError` if it is empty, too long, or has ids out of range."""
        if isinstance(prompt, str):
            ids = [self.model_config.bos_token_id, *self.tokenizer.encode_text(prompt)] if prompt else []
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            ids = self._encode_items(list(prompt))
        else:
            raise UsageError(f"The prompt is a {type(prompt).__name__}: give text, token ids, or chat messages.")
        if not ids:
            raise UsageError("The prompt is empty: give at least one character, token id or message.")
        if len(ids) >= self.max_model_len:
            raise UsageError(
                f"The prompt has {len(ids)} tokens; prompt and answer together have room for {self.max_model_len}. "
                "Shorten it, or raise --kv-tokens or --max-model-len."
            )
        return ids

    def _encode_items(self, items: list[Any]) -> list[int]:
        """Chat messages through the official template, or token ids, checked."""
        messages = [item for item in items if isinstance(item, Mapping)]
        if items and len(messages) == len(items):
            return encode_chat(self.tokenizer, messages)
        check_prompt_ids(items, self.model_config)
        return items

    def stats(self) -> dict[str, Any]:
        """Counters since the start, seconds by part of a step, and what is in use now; of several ranks, rank 0's."""

        def read(core: EngineCore) -> dict[str, Any]:
            scheduler = core.scheduler
            return asdict(core.stats) | {
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "free_slots": scheduler.slots.free,
                "free_pages": scheduler.pages.free,
                "replays": dict(sorted(self._programs.replays.items())),
                "not_replayed": {reason.value: count for reason, count in self._programs.not_replayed.items()},
                "traffic": asdict(self._traffic) if self._traffic is not None else None,
            }

        answer = self._loop.ask(read)
        assert isinstance(answer, dict)
        return answer

    def _encode_all(self, prompts: Sequence[Prompt], params: Params) -> tuple[list[list[int]], list[SamplingParams]]:
        """All prompts and the parameters of each, before any is answered."""
        if isinstance(prompts, str):
            raise UsageError("generate takes a list of prompts: generate([prompt])")
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        elif len(params) == len(prompts):
            each = list(params)
        else:
            raise UsageError(f"{len(params)} sampling parameters for {len(prompts)} prompts: give one, or one for each")
        return [self.encode(prompt) for prompt in prompts], each

    def _requests(
        self, number: int, ids: list[int], params: SamplingParams, sink: Callable[[Delta], None]
    ) -> list[Request]:
        """The requests for all answers to one prompt."""
        check_params_ids(params, self.model_config)
        eos = () if params.ignore_eos else (self.model_config.eos_token_id,)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        now = time.monotonic()
        return [
            Request(
                tokens=list(ids),
                max_length=self.max_model_len,
                deadline=now + params.timeout if params.timeout is not None else float("inf"),
                params=params,
                text=AnswerText(self.tokenizer, params.stop),
                sink=sink,
                prompt=number,
                index=index,
                seed=seed,
                ending=(*params.stop_token_ids, *eos),
                prompt_length=len(ids),
                arrival=now,
            )
            for index in range(params.n)
        ]


class Engine(EngineBase):
    """A model with its state, answering many prompts at once. Usable as a context manager.

    ``Engine()`` serves octavo-nano, ``Engine("path")`` a checkpoint; ``Engine(EngineConfig(...))`` says more.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is left and end. The engine cannot be used afterwards."""
        self._close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Result]:
        """Answer the prompts, in their order; all of them are in work at once.

        ``on_progress(finished, total)`` counts answers. Interrupted by Ctrl-C it returns what there is, unfinished
        answers with finish reason ``abort``. Raises :class:`UsageError` if a prompt cannot be answered, before any is.
        """
        encoded, each = self._encode_all(prompts, params)
        stream = Stream(self._loop)
        pairs = list(enumerate(zip(encoded, each, strict=True)))
        stream.submit([r for number, (ids, one) in pairs for r in self._requests(number, ids, one, stream.put)])
        total, heard = sum(one.n for one in each), 0
        while not stream.finished:
            try:
                for delta in stream:
                    heard += delta.answer is not None
                    if delta.answer is not None and on_progress is not None:
                        on_progress(heard, total)
            except KeyboardInterrupt:
                stream.abort()
        return [stream.result(number, ids, one.n) for number, (ids, one) in pairs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """The answers to one prompt as they are made; the prompt is checked first."""
        stream = Stream(self._loop)
        stream.submit(self._requests(0, self.encode(prompt), params or SamplingParams(), stream.put))
        return stream


class Stream(Iterator[Delta]):
    """What requests give out, in the order it comes, until all of them have ended.

    As a context manager it aborts what is left when it is left; a stream that is dropped goes on to its end.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._requests: list[Request] = []
        self._failure: EngineFailure | None = None
        self.answers: dict[tuple[int, int], Answer] = {}
        """Finished answers by (prompt, index); complete even if a consumer was interrupted between two deltas."""
        self._prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def finished(self) -> bool:
        """All answers are there. Raises :class:`EngineFailure` if the engine ended first."""
        if self._failure is not None:
            raise self._failure
        return len(self.answers) == len(self._requests)

    def put(self, delta: Delta) -> None:
        """The requests' sink, called in the engine's thread."""
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[delta.prompt] = delta.prompt_logprobs
        if delta.answer is not None:
            self.answers[delta.prompt, delta.index] = delta.answer
        self._queue.put(delta)

    def submit(self, requests: list[Request]) -> None:
        self._loop.submit(requests, self._fail)
        self._requests += requests

    def _fail(self, failure: EngineFailure) -> None:
        self._failure = failure
        self._queue.put(None)

    def __next__(self) -> Delta:
        """The next delta. An interrupted wait loses no answer: the end is told by :attr:`answers`, not by counting."""
        while True:
            if self._queue.empty() and self.finished:
                raise StopIteration
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=0.5)
                if item is None:
                    assert self._failure is not None
                    raise self._failure
                return item

    def abort(self) -> None:
        """End the requests as they are; their last deltas still come."""
        for request in self._requests:
            self._loop.abort(request)

    def result(self, prompt: int, ids: list[int], count: int) -> Result:
        """The finished answers to one prompt."""
        answers = [self.answers[prompt, index] for index in range(count)]
        return Result(ids, self._prompt_logprobs.get(prompt), answers)
