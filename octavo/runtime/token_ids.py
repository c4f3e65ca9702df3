"""Token ids that come from outside, checked against a model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import UsageError
from octavo.model.config import ModelConfig
from octavo.runtime.sampling import SamplingParams


def check_prompt_ids(ids: Sequence[Any], config: ModelConfig) -> None:
    """Raise :class:`UsageError` for what is no token id, or the one of an image."""
    vocabulary, image = config.text_config.vocab_size, config.image_token_id
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise UsageError(f"The prompt holds {token!r}: token ids are integers from 0 to {vocabulary - 1}.")
        if token == image:
            raise UsageError(f"The prompt holds the image token {image}. Images are not understood yet.")


def check_params_ids(params: SamplingParams, config: ModelConfig) -> None:
    """Raise :class:`UsageError` that names the field for a token id beyond the vocabulary."""
    vocabulary = config.text_config.vocab_size
    for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in tokens:
            if token >= vocabulary:
                raise UsageError(f"{name} {token}: token ids are integers from 0 to {vocabulary - 1}")
