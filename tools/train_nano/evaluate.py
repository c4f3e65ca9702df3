"""Held-out accuracy with the training forward, teacher-forced: an answer counts if every token of it is the best.

That is the accuracy of a greedy run that has to give the same answer token by token, at the cost of one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.runtime.suites.registry import SUITES
from octavo.runtime.tokenizer import Tokenizer
from tools.train_nano.attention import Step
from tools.train_nano.forward import forward
from tools.train_nano.loop import answers_right
from tools.train_nano.masters import Masters
from tools.train_nano.render import ChatFormat, Conversation
from tools.train_nano.rows import Numerics
from tools.train_nano.sdpa import fused_attention

_ROW_TOKENS = 256
_BATCH_TOKENS = 32768


def held_out(tokenizer: Tokenizer, suite: str, seed: int, count: int) -> list[Conversation]:
    """Items that training never saw, rendered without thinking."""
    chat = ChatFormat(tokenizer)
    conversations = []
    for index in range(count):
        item = SUITES[suite](seed, index)
        conversation = Conversation(chat, None)
        conversation.user(item.question)
        conversation.answer(item.reasoning, item.reasoning, item.final)
        conversations.append(conversation)
    return conversations


@torch.no_grad()
def accuracy(masters: Masters, conversations: Sequence[Conversation], pad: int, *, quantised: bool) -> float:
    """Share of conversations whose learned tokens are all predicted; sparse, as the engine runs."""
    device = next(masters.parameters()).device
    numerics = Numerics(masters.dtype, weights=quantised, activations=quantised)
    longest = max(len(c.ids) for c in conversations)
    length = -(-longest // _ROW_TOKENS) * _ROW_TOKENS
    rows = max(1, _BATCH_TOKENS // length)
    right = 0
    for low in range(0, len(conversations), rows):
        part = conversations[low : low + rows]
        ids = torch.full((len(part), length), pad)
        learned = torch.zeros(len(part), length, dtype=torch.bool)
        for row, conversation in enumerate(part):
            ids[row, : len(conversation.ids)] = torch.tensor(conversation.ids)
            learned[row, : len(conversation.ids)] = torch.tensor(conversation.weights) == 1.0
        row_of, place = learned.nonzero(as_tuple=True)
        wanted, targets = (row_of * length + place - 1).to(device), ids[row_of, place].to(device)
        ids = ids.to(device)
        with fused_attention():
            logits: Tensor = forward(masters, Step(numerics, len(part), length, sparse=True), ids, wanted)
        right += int(answers_right(logits.argmax(1) == targets, row_of.to(device)).sum())
    return right / len(conversations)


def table(masters: Masters, tokenizer: Tokenizer, *, items: dict[str, int], seed: int = 1) -> str:
    """Accuracy by suite before and after rounding to the official formats, as text."""
    pad = masters.config.pad_token_id
    lines = [f"{'suite':12} {'items':>6} {'F32 masters':>12} {'as stored':>10}"]
    for suite, count in items.items():
        conversations = held_out(tokenizer, suite, seed, count)
        before = accuracy(masters, conversations, pad, quantised=False)
        after = accuracy(masters, conversations, pad, quantised=True)
        lines.append(f"{suite:12} {count:6} {before:12.1%} {after:10.1%}")
    return "\n".join(lines)
