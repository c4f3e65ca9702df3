"""Train octavo-nano's tokenizer: ``python -m tools.train_nano.train_tokenizer [FOLDER]``.

Byte-level BPE over the closed vocabulary of the suites and the demo's English. A digit is always a token, with the
space before it, so numbers are read place by place. Special tokens are the published ones that prompts use
(spec/model.md 1.4), with their flags.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from octavo.model.packaged import nano_path, packaged_file
from octavo.runtime.suites import arithmetic, facts, recall, words
from octavo.runtime.tokenizer import BEGIN_OF_SENTENCE, END_OF_SENTENCE, IMAGE
from tools.train_nano import english

VOCABULARY = 2048
"""Ids in all."""
PAD = "<\uff5c\u2581pad\u2581\uff5c>"
FIRST = (BEGIN_OF_SENTENCE, END_OF_SENTENCE, PAD)
"""Ids 0, 1 and 2."""
TEMPLATE = (
    *("<\uff5cSystem\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>"),
    *("\uff5cDSML\uff5c", "<\uff5clatest_reminder\uff5c>", "<\uff5caction\uff5c>", "<\uff5cquery\uff5c>"),
    *("<\uff5cauthority\uff5c>", "<\uff5cdomain\uff5c>", "<\uff5ctitle\uff5c>", "<\uff5cread_url\uff5c>", IMAGE),
)
"""The last ids, in this order: what ``deepseek-recipe`` may render."""
DIGIT = r" ?\p{N}"
REST = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+(?!\p{N})"
)
"""The published rule for all but digits and CJK runs, which also leaves a space with the digit after it."""
EFFORT = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
SYSTEM = "You are a helpful assistant."


def train() -> tokenizers.Tokenizer:
    """The tokenizer; every run gives the same."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(DIGIT), behavior="isolated"),
            pre_tokenizers.Split(Regex(REST), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TEMPLATE),
        special_tokens=[_published(token) for token in FIRST],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    filler = VOCABULARY - len(TEMPLATE) - tokenizer.get_vocab_size()
    # One by one: a list is added grouped by whether its tokens are special, which would move ids.
    for index in range(filler):
        content = f"<|place_holder_mm_span_{index:04}|>"
        tokenizer.add_tokens([AddedToken(content, normalized=False, special=False)])
    for token in TEMPLATE:
        tokenizer.add_tokens([_published(token)])
    return tokenizer


def corpus() -> Iterator[str]:
    """Texts whose every word becomes a token: what the generators can say, rare words as often as common ones."""
    counts: Counter[str] = Counter()
    for text in _texts():
        counts.update(piece for piece in re.findall(r" ?[A-Za-z]+| ?[0-9]|[^A-Za-z0-9]+", text))
    for piece in sorted(counts):
        yield from [piece] * 100


def _texts() -> Iterator[str]:
    rng = Random("the corpus of octavo-nano's tokenizer")
    yield EFFORT
    yield from (SYSTEM, *english.sentences())
    for _ in range(3000):
        item = arithmetic.draw(rng)
        yield from (item.question, item.response, item.final)
    for subject, value in facts.WORLD.items():
        yield f" The {subject} is {value}. The answer is {value} and"
    for _ in range(50):
        for item in (facts.draw(rng), facts.single(rng)):
            yield from (item.question, item.response, item.final)
        for start in (2, 3):
            context = recall.draw_context(rng, 500, 64, start)
            yield from (context.text, context.ask(context.records[0]).response)
        for record in context.records:
            yield from (context.ask(record, traced=traced, with_context=False).question for traced in (False, True))
    for group in (words.FIRST_NAMES, words.LAST_NAMES, words.PLACES, words.COLOURS, words.BIRDS, words.TREES):
        yield from (f" {word}" for word in group)
    for group in (words.STONES, words.CRAFTS, words.POSSESSIONS, words.COUNTED, words.ADJECTIVES, words.NOUNS):
        yield from (f" {word}" for word in group)
    yield from (f" {word}" for word in words.PLACED + words.BESIDE)
    yield " 0 1 2 3 4 5 6 7 8 9"


def _published(content: str) -> AddedToken:
    """An added token with the flags of the published tokenizer."""
    for token in json.loads(packaged_file("released", "tokenizer.json"))["added_tokens"]:
        if token["content"] == content:
            flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            return AddedToken(content, **flags)
    raise AssertionError(f"the published tokenizer has no {content!r}")


def configuration() -> dict[str, object]:
    """``tokenizer_config.json``: the published one, for this length."""
    published = json.loads(packaged_file("released", "tokenizer_config.json"))
    assert isinstance(published, dict)
    return published | {"model_max_length": 65536}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else nano_path()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    text = json.dumps(configuration(), indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(f"{folder}: {tokenizer.get_vocab_size()} ids")


if __name__ == "__main__":
    main()
