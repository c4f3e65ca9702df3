"""An engine that hears messages and answers with messages; in the engine process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from octavo.errors import OctavoError, UsageError
from octavo.runtime.assemble import Progress
from octavo.runtime.config import EngineConfig
from octavo.runtime.engine import Engine
from octavo.runtime.grammar_mask import GrammarMasks
from octavo.runtime.logprobs import TokenLogprob
from octavo.runtime.loop import EngineFailure
from octavo.runtime.ranks.given import is_given
from octavo.runtime.request import Delta, Request
from octavo.runtime.server import messages
from octavo.runtime.server.messages import Abort, AskStats, Finished, FromEngine, Refused, Stats, Submit, Tokens


class ServedEngine(Engine):
    """What requests give out goes to ``send``, which only queues: it is called in the engine's thread too."""

    def __init__(self, config: EngineConfig, progress: Progress, send: Callable[[FromEngine], None]) -> None:
        """As of every engine. Raises :class:`UsageError` under torchrun, whose other ranks would listen too."""
        if is_given():
            raise UsageError(
                "octavo serve starts its ranks itself, on one host: give --ranks without torchrun. Ranks on several "
                "hosts answer through `octavo generate` and the Python interface."
            )
        super().__init__(config, progress)
        self._send = send
        self._open: dict[str, list[Request]] = {}
        self._grammars = GrammarMasks(self.tokenizer, self.model_config.eos_token_id)
        self._asker = ThreadPoolExecutor(1, "octavo-stats")

    def ready(self) -> messages.Ready:
        """What clients may count on."""
        return messages.Ready(
            description=self.describe(),
            max_model_len=self.max_model_len,
            max_requests=self.capacity.sizes.slots,
            vocab_size=self.model_config.text_config.vocab_size,
            timeline=self.timeline,
        )

    def wait(self) -> EngineFailure | None:
        """Block until the engine has ended -> what it ended of, None if it was closed."""
        return self._loop.wait()

    def handle(self, message: Submit | Abort | AskStats) -> None:
        """Do what a message says, without waiting for a step."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            for number, request in enumerate(self._open.get(message.id, ())):
                if message.index is None:
                    self._loop.abort(request)
                elif message.index == number:
                    self._loop.abort(request, "stop")
        else:
            self._asker.submit(self._tell_stats, message.number)

    def stats(self) -> dict[str, Any]:
        """As of every engine, with how many slots and pages there are in all."""
        return super().stats() | {"slots": self.capacity.sizes.slots, "pages": self.capacity.sizes.pages}

    def _submit(self, message: Submit) -> None:
        try:
            params = messages.sampling_params(message.params)
            if message.grammar is not None:
                answers = len(message.prompts) * params.n
                mask = self._grammars.mask(message.grammar, thinking=message.thinking, answers=answers)
                params = dataclasses.replace(params, token_mask=mask)
            sink = functools.partial(self._give, message.id, params.n)
            encoded = list(map(self.encode, message.prompts))
            requests = [one for number, ids in enumerate(encoded) for one in self._requests(number, ids, params, sink)]
            self._open[message.id] = requests
            self._loop.submit(requests, _told_by_wait)
        except EngineFailure:
            return
        except OctavoError as error:
            self._open.pop(message.id, None)
            self._send(Refused(id=message.id, message=str(error)))

    def _give(self, request_id: str, n: int, delta: Delta) -> None:
        """The requests' sink."""
        index = delta.prompt * n + delta.index
        if delta.id is not None or delta.text:
            logprobs = delta.prompt_logprobs
            self._send(
                Tokens(
                    id=request_id,
                    index=index,
                    text=delta.text,
                    token=delta.id,
                    logprob=_logprob(delta.logprob),
                    prompt_logprobs=[_logprob(one) for one in logprobs] if logprobs is not None else None,
                )
            )
        answer = delta.answer
        if answer is None:
            return
        if all(request.done for request in self._open[request_id]):
            del self._open[request_id]
        self._send(
            Finished(
                id=request_id,
                index=index,
                reason=answer.finish_reason,
                error=answer.error,
                answer_tokens=len(answer.ids),
                queue_seconds=answer.queue_seconds,
                prefill_seconds=answer.prefill_seconds,
                decode_seconds=answer.decode_seconds,
                preemptions=answer.preemptions,
            )
        )

    def _tell_stats(self, number: int) -> None:
        try:
            self._send(Stats(number=number, stats=self.stats()))
        except EngineFailure:
            return  # told by wait()


def _told_by_wait(failure: EngineFailure) -> None:
    """One word on a failure is enough for all requests."""


def _logprob(value: TokenLogprob | None) -> messages.Logprob | None:
    return None if value is None else messages.Logprob(value.id, value.logprob, list(value.top))
