"""Which tokens may come next in an answer that must match a grammar: hooks for ``SamplingParams.token_mask``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from octavo.errors import OctavoError
from octavo.runtime.chat import THINK_END
from octavo.runtime.sampling import TokenMask
from octavo.runtime.server.grammar import LIMITS, compile_grammar, panics_raise, unusable
from octavo.runtime.server.messages import Grammar
from octavo.runtime.tokenizer import Tokenizer


class GrammarMasks:
    """Grammars on one vocabulary. A vocabulary of 129,280 tokens takes half a second to prepare."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, eos_token_id))
        self._vocabulary = LLTokenizer(vocabulary, n_vocab=tokenizer.vocab_size)

    def mask(self, grammar: Grammar, *, thinking: bool = False, answers: int = 1) -> TokenMask:
        """The hook for one request with so many answers.

        An answer ends when it matches, and not before. With ``thinking`` it begins with reasoning, which is any text
        up to the token ``</think>``. Raises :class:`UsageError` for a grammar that cannot be used.
        """
        think_end = self._tokenizer.special_id(THINK_END) if thinking else None
        compiled = compile_grammar(grammar, think_end)
        with panics_raise(unusable(grammar, "llguidance fails at it")):
            matcher = LLMatcher(self._vocabulary, compiled, log_level=0, limits=LIMITS)
            first = matcher.deep_copy()
            first.compute_bitmask()
        if first.is_error():  # nothing matches, or it is too large for this vocabulary
            raise unusable(grammar, first.get_error())
        return _Mask(matcher, answers, self._tokenizer.vocab_size)


class _Mask:
    """A state for each answer. States with the same tokens are equal, so it does not matter who takes which."""

    def __init__(self, matcher: LLMatcher, answers: int, vocab_size: int) -> None:
        self._states: list[tuple[list[int], LLMatcher]] = [([], matcher.deep_copy()) for _ in range(answers)]
        self._vocab_size = vocab_size

    def __call__(self, answer: Sequence[int]) -> Tensor:
        tokens, matcher = self._state(list(answer[:-1]))
        with panics_raise(OctavoError("The answer's grammar cannot go on: llguidance fails at it")):
            if answer:
                tokens.append(answer[-1])
                matcher.consume_token(answer[-1])
            allowed = matcher.compute_bitmask()
        if matcher.is_error():
            raise OctavoError(f"The answer's grammar cannot go on: {matcher.get_error()}")
        bits = numpy.unpackbits(numpy.frombuffer(allowed, numpy.uint8), count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(numpy.bool_))

    def _state(self, tokens: list[int]) -> tuple[list[int], LLMatcher]:
        for state in self._states:
            if state[0] == tokens:
                return state
        raise AssertionError("a mask is asked once for each token of an answer, in their order")


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        # Added tokens and ids without a token are no text, whatever they are spelled like.
        known = tokenizer.backend.get_vocab(with_added_tokens=True).values()
        added = tokenizer.backend.get_added_tokens_decoder()
        self.special_token_ids = sorted(set(range(tokenizer.vocab_size)).difference(known).union(added))

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_text(text.decode())
