"""An engine without a model, in the same process: it answers at once with what a test wants."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from octavo.model.config import ModelConfig
from octavo.model.packaged import nano_path
from octavo.runtime.answer_text import AnswerText
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.server.engine_interface import EngineGone, EngineState, NotReady, Overloaded, RequestStream
from octavo.runtime.server.messages import Finished, Logprob, Ready, Refused, Submit, Tokens, frame, sampling_params
from octavo.runtime.tokenizer import Tokenizer

MODEL_CONFIG = ModelConfig.from_path(nano_path())
TOKENIZER = Tokenizer.from_checkpoint(nano_path(), MODEL_CONFIG)
MODEL = "octavo-nano"
EOS = MODEL_CONFIG.eos_token_id
THOUGHT, TEXT = "I think.", "Hello, wörld! 😀 Bye."
READY = Ready(description="a stub", max_model_len=1000, max_requests=8, vocab_size=TOKENIZER.vocab_size, timeline=[])


def encode(text: str) -> list[int]:
    """Ids of an answer, in which the spelling of an added token is the token, with the end of sentence."""
    return [*TOKENIZER.backend.encode(text, add_special_tokens=False).ids, EOS]


class StubClient:
    """Implements ``EngineClient``. Each answer is ``answer(submit, index)``, cut at ``max_tokens``.

    A test may change every attribute between two requests.
    """

    def __init__(self) -> None:
        self.open_requests: dict[str, tuple[asyncio.Task[None], str]] = {}
        self.reset()

    def reset(self) -> None:
        """Behave as a stub that was just made."""
        self.answer: Callable[[Submit, int], str] = greeting
        self.state = EngineState(phase="ready", detail="", ready=READY)
        self.submitted: deque[Submit] = deque(maxlen=8)
        self.owners: deque[str] = deque(maxlen=8)
        self.aborted: deque[str] = deque(maxlen=8)
        """By closing their streams."""
        self.stopped: deque[int] = deque(maxlen=8)
        """Answers that were ended alone, at a stop string."""
        self.refusal: str | None = None
        self.token_seconds = 0.0
        """Between two tokens; 0 gives all of them at once."""
        self.first_token_seconds = 0.0
        self.most_open: int | None = None
        self.failure: str | None = None
        """Error of every answer, after its first token."""
        self.gone_after: int | None = None
        """Tokens of an answer after which the engine is gone."""

    def open(self, submit: Submit, owner: str = "") -> RequestStream:
        if self.state.phase != "ready":
            raise NotReady(f"The engine is {self.state.phase}: {self.state.detail}")
        if self.most_open is not None and len(self.open_requests) >= self.most_open:
            raise Overloaded("Too many requests wait.", 7)
        frame([submit])  # it could go to another process
        self.submitted.append(submit)
        self.owners.append(owner)
        params = sampling_params(submit.params)
        answers = [
            _Answer(submit, params, index, encode(self.answer(submit, index)), self.failure)
            for index in range(len(submit.prompts) * params.n)
        ]

        def abort(index: int | None) -> None:
            if index is None:
                self._end(submit.id)
            elif not answers[index].finished:
                self.stopped.append(index)
                answers[index].finish(stream, "stop")

        stream = RequestStream(submit, abort)
        task = asyncio.get_running_loop().create_task(self._run(submit, stream, answers))
        self.open_requests[submit.id] = (task, owner)
        task.add_done_callback(lambda _: self.open_requests.pop(submit.id, None))
        return stream

    def _end(self, request_id: str) -> None:
        entry = self.open_requests.get(request_id)
        if entry is not None:
            self.aborted.append(request_id)
            entry[0].cancel()

    async def stats(self) -> dict[str, Any]:
        numbers = ("steps", "rows", "prompt_tokens", "generated_tokens", "preemptions", "waiting", "slots", "pages")
        maps = ("finished", "seconds", "replays", "not_replayed")
        overlap = ("overlapped_steps", "early_reads", "rows_in_vain")
        counts = dict.fromkeys((*numbers, *overlap, "free_slots", "free_pages"), 0)
        return counts | {"running": len(self.open_requests)} | {name: {} for name in maps}

    def abort(self, request_id: str, owner: str = "") -> bool:
        entry = self.open_requests.get(request_id)
        if entry is None or entry[1] != owner:
            return False
        entry[0].cancel()
        return True

    async def _run(self, submit: Submit, stream: RequestStream, answers: list[_Answer]) -> None:
        if self.refusal is not None:
            stream.put(Refused(id=submit.id, message=self.refusal))
            return
        if self.first_token_seconds:
            await asyncio.sleep(self.first_token_seconds)
        made = 0
        try:
            while any(not answer.finished for answer in answers):
                for answer in answers:
                    if not answer.finished:
                        answer.step(stream)
                made += 1
                if made == self.gone_after:
                    stream.put(EngineGone("The engine ended: it was killed."))
                    return
                if self.token_seconds:
                    await asyncio.sleep(self.token_seconds)
        except asyncio.CancelledError:
            for answer in answers:
                answer.finish(stream, "abort")


class _Answer:
    def __init__(self, submit: Submit, params: SamplingParams, index: int, ids: list[int], failure: str | None) -> None:
        self._submit = submit
        self._prompt = submit.prompts[index // params.n]
        self._params = params
        self._index = index
        self._ids = iter(ids)
        self._failure = failure
        self._text = AnswerText(TOKENIZER, params.stop)
        self._made = 0
        self.finished = False

    def step(self, stream: RequestStream) -> None:
        token = next(self._ids)
        self._made += 1
        if self._failure is not None and self._made > 1:
            self.finish(stream, "error", error=self._failure)
        elif token == EOS and not self._params.ignore_eos:
            self._give(stream, self._text.finish()[0], token)
            self.finish(stream, "stop")
        else:
            text, stop = self._text.push(token)
            ended = self._made == self._params.max_tokens
            self._give(stream, text + (self._text.finish()[0] if ended and stop is None else ""), token)
            if stop is not None:
                self.finish(stream, "stop")
            elif ended:
                self.finish(stream, "length")

    def _give(self, stream: RequestStream, text: str, token: int) -> None:
        wanted, prompt = self._params.logprobs, self._params.prompt_logprobs
        stream.put(
            Tokens(
                id=self._submit.id,
                index=self._index,
                text=text,
                token=token,
                logprob=None if wanted is None else _logprob(token, wanted),
                prompt_logprobs=None
                if prompt is None or self._made > 1
                else [None, *(_logprob(token, prompt) for token in self._prompt[1:])],
            )
        )

    def finish(self, stream: RequestStream, reason: Any, error: str | None = None) -> None:
        if self.finished:
            return
        self.finished = True
        stream.put(
            Finished(
                id=self._submit.id,
                index=self._index,
                reason=reason,
                error=error,
                answer_tokens=self._made,
                queue_seconds=0.0,
                prefill_seconds=0.0,
                decode_seconds=0.0,
                preemptions=0,
            )
        )


def _logprob(token: int, count: int) -> Logprob:
    return Logprob(token, -0.5, [(token, -0.5), (5, -3.0), (6, -4.0)][:count])


def greeting(submit: Submit, index: int) -> str:
    """What is answered to everything."""
    return f"{THOUGHT}</think>{TEXT}" if submit.thinking else TEXT
