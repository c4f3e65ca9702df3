"""Text to ids and back.

Text that a user wrote never becomes an added token: it is encoded without the added vocabulary, so the spelling of
one is ordinary text to the model. Templates place added tokens by :meth:`Tokenizer.special_id`.
Source: spec/model.md 1.4 (vocabulary), 5 (encoding).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers

from octavo.errors import OctavoError, UsageError
from octavo.model.config import ModelConfig

BEGIN_OF_SENTENCE = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
END_OF_SENTENCE = "<\uff5cend\u2581of\u2581sentence\uff5c>"
IMAGE = "<\uff5cdeepseek_image\uff5c>"

_NO_TOKEN = "\ufffd".encode()


class Tokenizer:
    """A byte-level BPE vocabulary with added tokens, as a checkpoint's ``tokenizer.json`` holds it.

    Encoding yields only ids that have a token. Decoding takes every id below ``vocab_size``: one without a token
    (the embedding may have more rows than the vocabulary) reads as U+FFFD, so that it can be seen; others are errors.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: ModelConfig) -> None:
        """Raises :class:`OctavoError` if ``backend`` is not byte-level or disagrees with ``config``."""
        self.backend = backend
        self.vocab_size = config.text_config.vocab_size
        added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        vocabulary = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        _check(backend, added, vocabulary, config)
        self._special_ids = {content: token_id for token_id, content in added.items()}
        self._plain = tokenizers.Tokenizer(backend.model)
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        self._bytes = [_NO_TOKEN] * self.vocab_size
        byte_of = _byte_alphabet()
        for token_id, token in vocabulary.items():
            self._bytes[token_id] = _token_bytes(token, byte_of)
        for token_id, content in added.items():
            self._bytes[token_id] = content.encode()

    @staticmethod
    def from_checkpoint(path: Path, config: ModelConfig) -> Tokenizer:
        """Read ``tokenizer.json`` in the directory ``path``; it must fit ``config``, that of the same checkpoint.

        Raises :class:`UsageError` if there is none, :class:`OctavoError` if it is damaged or does not fit.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise UsageError(f"{path}: no tokenizer.json there. Copy the one that belongs to the checkpoint.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise OctavoError(f"{file}: not a readable tokenizer ({error}). Fetch the file again.") from error
        try:
            return Tokenizer(backend, config)
        except OctavoError as error:
            raise OctavoError(f"{file}: {error}") from error

    def encode_text(self, text: str) -> list[int]:
        """The ids of ``text`` as plain text: nothing in it becomes an added token, nothing is put before or after.

        Raises :class:`UsageError` if ``text`` is not valid Unicode (it holds a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"The text is not valid Unicode: {error}. Remove or replace lone surrogates.") from error
        # As a batch, because that lets other threads run meanwhile.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def special_id(self, content: str) -> int:
        """The id of an added token by its exact text. Raises :class:`OctavoError` if there is no such token."""
        if content not in self._special_ids:
            raise OctavoError(f"tokenizer.json has no added token {content!r}, which DeepSeek-V4.1 prompts need.")
        return self._special_ids[content]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that ``token_id`` stands for: often no whole characters. Added tokens are their text.

        Raises :class:`UsageError` if ``token_id`` is outside ``vocab_size``.
        """
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"Token id {token_id} is outside the vocabulary: 0 to {self.vocab_size - 1} are allowed.")
        return self._bytes[token_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, added tokens included. Bytes that are not UTF-8 read as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


class IncrementalDecoder:
    """Decodes ids as they come, whole characters only.

    The texts returned by :meth:`push` and the last one by :meth:`finish` concatenate to ``decode(all ids)``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes, possibly empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left of an unfinished character: U+FFFD or nothing. The decoder is then ready for another text."""
        return self._decoder.decode(b"", final=True)


def _check(
    backend: tokenizers.Tokenizer, added: dict[int, str], vocabulary: dict[int, str], config: ModelConfig
) -> None:
    last = max(vocabulary, default=-1)
    if last >= config.text_config.vocab_size:
        raise OctavoError(
            f"the tokenizer has ids up to {last}, but text_config.vocab_size is {config.text_config.vocab_size}. "
            "Use the config.json and the tokenizer.json of one checkpoint."
        )
    missing = [character for character in _byte_alphabet() if backend.model.token_to_id(character) is None]
    if not isinstance(backend.decoder, decoders.ByteLevel) or missing:
        raise OctavoError(
            "the tokenizer is not byte-level (a ByteLevel decoder and a token for each of the 256 bytes; "
            f"{len(missing)} are missing), so it could lose text. Use a DeepSeek-V4.1 tokenizer."
        )
    for key, token_id, content in (
        ("bos_token_id", config.bos_token_id, BEGIN_OF_SENTENCE),
        ("eos_token_id", config.eos_token_id, END_OF_SENTENCE),
        ("image_token_id", config.image_token_id, IMAGE),
    ):
        if token_id is not None and added.get(token_id) != content:
            raise OctavoError(
                f"{key} is {token_id} in config.json, which the tokenizer reads as {vocabulary.get(token_id)!r} "
                f"and not as the added token {content!r}. Use the config.json and the tokenizer.json of one checkpoint."
            )


def _byte_alphabet() -> dict[str, int]:
    """The character by which a byte-level vocabulary spells each byte.

    Printable Latin-1 characters spell themselves, the other bytes take the code points from 256 on, in order.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_of = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(set(range(256)) - set(byte_of.values()))
    return byte_of | {chr(256 + index): byte for index, byte in enumerate(others)}


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:  # not spelled in bytes: literal text, as the reference decoder reads it
        return token.encode()
