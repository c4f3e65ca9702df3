"""The packaged tokenizer of octavo-nano for tests of its data, whatever the rest of its configuration is."""

from __future__ import annotations

import dataclasses
import functools

import tokenizers

from octavo.model.packaged import nano_path
from octavo.model.presets import mini
from octavo.runtime.tokenizer import IMAGE, Tokenizer
from tools.train_nano.train_tokenizer import VOCABULARY


@functools.cache
def nano_backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(nano_path() / "tokenizer.json"))


@functools.cache
def nano_tokenizer() -> Tokenizer:
    config, backend = mini(), nano_backend()
    text = dataclasses.replace(config.text_config, vocab_size=VOCABULARY)
    image = backend.token_to_id(IMAGE)
    return Tokenizer(backend, dataclasses.replace(config, text_config=text, image_token_id=image))
