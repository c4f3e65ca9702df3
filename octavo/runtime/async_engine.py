"""The engine for asyncio: the same requests, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from octavo.runtime.engine import EngineBase, Params, Prompt, Result
from octavo.runtime.logprobs import TokenLogprob
from octavo.runtime.loop import EngineFailure
from octavo.runtime.request import Answer, Delta, Request
from octavo.runtime.sampling import SamplingParams


class AsyncEngine(EngineBase):
    """Like :class:`~octavo.runtime.engine.Engine`; leaving a stream early or cancelling its task aborts it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what is left and end. The engine cannot be used afterwards."""
        await asyncio.to_thread(self._close)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """The answers to one prompt as they are made."""
        params = params or SamplingParams()
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Delta | EngineFailure] = asyncio.Queue()

        def put(item: Delta | EngineFailure) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        requests: list[Request] = self._requests(0, self.encode(prompt), params, put)
        try:
            self._loop.submit(requests, put)
            ended = 0
            while ended < len(requests):
                item = await arrived.get()
                if isinstance(item, EngineFailure):
                    raise item
                ended += item.answer is not None
                yield item
        finally:
            for request in requests:
                self._loop.abort(request)

    async def generate(self, prompts: Sequence[Prompt], params: Params = None) -> list[Result]:
        """Answer the prompts, in their order; all of them are in work at once."""
        encoded, each = self._encode_all(prompts, params)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._result(ids, one)) for ids, one in zip(encoded, each, strict=True)]
        return [task.result() for task in tasks]

    async def _result(self, ids: list[int], params: SamplingParams) -> Result:
        answers: dict[int, Answer] = {}
        prompt_logprobs: list[TokenLogprob | None] | None = None
        async for delta in self.stream(ids, params):
            if delta.prompt_logprobs is not None:
                prompt_logprobs = delta.prompt_logprobs
            if delta.answer is not None:
                answers[delta.index] = delta.answer
        return Result(ids, prompt_logprobs, [answers[index] for index in range(params.n)])
