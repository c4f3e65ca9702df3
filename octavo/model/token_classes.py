"""The token map of Engram: which ids count as the same word.

Ids whose texts differ in case, accents, compatibility forms or surrounding space only share a class, and n-grams
are made of classes. Source: spec/model.md 3.11.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import normalizers

from octavo.errors import OctavoError
from octavo.model.config import TextConfig

_SPACES = re.compile(r"[ \t\r\n]+")


def token_map(tokenizer: tokenizers.Tokenizer, text: TextConfig) -> npt.NDArray[np.int64]:
    """The class of every id, int64 ``[vocab_size]``, checked against the config (spec/model.md 3.11).

    Raises :class:`OctavoError` if the tokenizer does not give ``engram_compressed_vocab_size`` classes: then the
    tokenizer is not the one the model was trained with, and every n-gram would read a wrong row.
    """
    classes = token_classes(tokenizer, text.vocab_size)
    count = int(classes.max()) + 1
    if count != text.engram_compressed_vocab_size:
        raise OctavoError(
            f"text_config.engram_compressed_vocab_size: {text.engram_compressed_vocab_size}, but the tokenizer gives "
            f"{count} classes. Use the config.json and the tokenizer.json of one checkpoint."
        )
    return classes


def pad_class(classes: npt.NDArray[np.int64], text: TextConfig) -> int:
    """The class that stands in for tokens before the sequence and for image positions (spec/model.md 3.11)."""
    return int(classes[text.engram_pad_token_id])


def token_classes(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> npt.NDArray[np.int64]:
    """The class of every id below ``vocab_size``, int64, numbered by first appearance (spec/model.md 3.11).

    Ids without a token share one class. Raises :class:`OctavoError` if the tokenizer has ids from ``vocab_size`` on.
    """
    spellings = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    last = max(spellings, default=-1)
    if last >= vocab_size:
        raise OctavoError(
            f"text_config.vocab_size: {vocab_size}, but the tokenizer has ids up to {last}. "
            "Use the config.json and the tokenizer.json of one checkpoint."
        )
    fold = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    texts = tokenizer.decode_batch([[i] for i in range(vocab_size)], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    classes = np.empty(vocab_size, dtype=np.int64)
    for token_id, text in enumerate(texts):
        if "\ufffd" in text:  # part of a character: only the vocabulary's own spelling tells such tokens apart
            key = spellings[token_id]
        else:
            folded = _SPACES.sub(" ", fold.normalize_str(text))
            key = (folded if folded == " " else folded.strip()) or text
        classes[token_id] = numbers.setdefault(key, len(numbers))
    return classes
