"""What the routes that answer share: the engine, the tokenizer, the name of the model, and the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe
from starlette.requests import Request

from octavo.model.config import ModelConfig
from octavo.runtime.server.config import ServerConfig
from octavo.runtime.server.engine_interface import EngineClient, NotReady, RequestStream
from octavo.runtime.server.errors import ApiError
from octavo.runtime.server.events import EngineAnswer, Writer
from octavo.runtime.server.messages import Grammar, Submit, sampling_params
from octavo.runtime.token_ids import check_params_ids
from octavo.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """Made once for an application."""

    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer
    answer_tokenizer: recipe.Tokenizer
    """The same vocabulary for ``deepseek-recipe``, which reads answers."""
    model_config: ModelConfig
    model: str
    """Name under which the model is served."""

    def check_model(self, name: str) -> None:
        """Raise :class:`ApiError` if a request names another model."""
        if name != self.model:
            message = f"The model {name!r} does not exist; {self.model!r} is served."
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together. Raises :class:`NotReady` while that is unknown."""
        ready = self.client.state.ready
        if ready is None:
            raise NotReady(f"The engine is {self.client.state.phase}: {self.client.state.detail}")
        return ready.max_model_len

    def ending(self, params: dict[str, Any]) -> frozenset[int]:
        """Tokens that end an answer and are no part of its text."""
        eos = () if params.get("ignore_eos") else (self.model_config.eos_token_id,)
        return frozenset((*params.get("stop_token_ids", ()), *eos))

    def open(
        self,
        request: Request,
        name: str,
        prompts: list[list[int]],
        params: dict[str, Any],
        grammar: Grammar | None = None,
        *,
        thinking: bool = False,
    ) -> RequestStream:
        """Begin to answer.

        Raises :class:`UsageError` for wrong ``params``, and what :meth:`EngineClient.open` raises.
        """
        check_params_ids(sampling_params(params), self.model_config)
        submit = Submit(id=name, prompts=prompts, params=params, grammar=grammar, thinking=thinking)
        stream = self.client.open(submit, owner=request.state.owner)
        request.state.record.stream = stream
        return stream

    def answer(self, stream: RequestStream, writer: Writer, *, streamed: bool) -> EngineAnswer:
        """What the engine says, as it goes to the client."""
        seconds = self.config.heartbeat_seconds
        return EngineAnswer(stream, writer, streamed=streamed, heartbeat_seconds=seconds)
