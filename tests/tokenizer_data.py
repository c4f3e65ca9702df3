"""The two tokenizers that tests use: the published one, which the package ships, and the mini checkpoint's."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import tokenizers

import octavo.model
from octavo.model.config import ModelConfig
from octavo.runtime.tokenizer import Tokenizer

GOLDENS = Path(__file__).parent / "goldens"
MINI = GOLDENS / "mini"
PUBLISHED = Path(octavo.model.__file__).parent / "data"


def published_json() -> str:
    return gzip.decompress((PUBLISHED / "tokenizer.json.gz").read_bytes()).decode()


@functools.cache
def published_backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(published_json())


@functools.cache
def mini_backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MINI / "tokenizer.json"))


@functools.cache
def config(folder: Path) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))


@functools.cache
def published_tokenizer() -> Tokenizer:
    return Tokenizer(published_backend(), config(PUBLISHED))


@functools.cache
def mini_tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(MINI, config(MINI))
