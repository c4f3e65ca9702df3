"""Which places of its pools a call of ``publish`` may write: read off the requests of a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.kernels.paging import ratio_of
from tests.kernels.batches import Batch
from tests.kernels.calls import same_bits
from tests.kernels.cases import Arguments


def assert_nothing_written_beside(batch: Batch, given: Arguments, state: Mapping[str, Tensor], what: str) -> None:
    """Places of ``state`` that are no row's of the batch hold what they held in the arguments ``given``, to the bit."""
    entries, waiting = written_places(batch, given["page_table"], given["entries"])
    for name, written in (("entries", entries), ("keys", entries), ("pending", waiting)):
        if given[name] is not None:
            untouched = ~written.to(given[name].device)
            assert same_bits(state[name][untouched], given[name][untouched]), f"{what}: {name} written beside"


def written_places(batch: Batch, page_table: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """(places of the pools of entries and keys [pages, 64 / ratio], slots that wait for a second half), both bool.

    A request writes an entry wherever it completes ``ratio`` tokens; a last token that begins a pair waits.
    """
    ratio, table = ratio_of(entries), page_table.tolist()
    written = torch.zeros(entries.shape[:2], dtype=torch.bool)
    waiting = torch.zeros(page_table.shape[0], dtype=torch.bool)
    for request in batch.requests:
        end = request.start + request.count
        for entry in range(request.start // ratio, end // ratio):
            page, place = divmod(entry, entries.shape[1])
            written[table[request.slot][page], place] = True
        waiting[request.slot] = end % ratio != 0
    return written, waiting
