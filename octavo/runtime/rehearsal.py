"""How much memory a step really takes on a GPU, measured before the pools get what is left (design section 5).

The estimate made before loading is for refusing what cannot work. Once the weights are there, one eager step of the
most rows that a step may have runs on pools just large enough for it, and tells what to keep free.
"""

from __future__ import annotations

import dataclasses
import logging

import torch

from octavo.errors import OctavoError
from octavo.kernels.paging import pages_for
from octavo.runtime.assemble import Assembly, most_rows
from octavo.runtime.capacity import plan_capacity
from octavo.runtime.config import EngineConfig
from octavo.runtime.pools import PoolSizes
from octavo.runtime.program_start import RESERVE
from octavo.runtime.runner import Chunk, Runner
from octavo.runtime.sampler import Draw, sample
from octavo.runtime.sampling import SamplingParams

_LOG = logging.getLogger("octavo.engine")
_DRAW = Draw(SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1), 0, 0, (0,), 1, ())
"""With all that takes memory. It comes from another pool than a captured step's."""


def with_measured_capacity(assembly: Assembly, config: EngineConfig) -> Assembly:
    """The assembly with pools sized by a measured step; as it is where the state's size was asked for, or on a CPU.

    Raises :class:`OctavoError` if not even one page fits beside weights and step.
    """
    if assembly.device.type != "cuda" or config.kv_tokens is not None:
        return assembly
    rows = most_rows(config)
    needed = step_memory(assembly, rows)
    _LOG.info("a step of %d rows takes %.2f GB beside weights and state", rows, needed / 1e9)
    text, storage = assembly.config.text_config, assembly.capacity.storage
    capacity = plan_capacity(config, text, storage, assembly.device, weight_bytes=0, step=needed)
    return dataclasses.replace(assembly, capacity=capacity)


def step_memory(assembly: Assembly, rows: int) -> int:
    """Bytes of static buffers, :data:`RESERVE` times the peak of an eager step of ``rows`` rows, and what drawing the
    tokens of as many answers takes, on the device."""
    device = assembly.device
    pages = pages_for(rows)
    slots = assembly.capacity.sizes.slots
    small = dataclasses.replace(assembly.capacity, sizes=PoolSizes(slots=slots, pages=pages, max_pages=pages))
    torch.cuda.empty_cache()
    try:
        return _measured(dataclasses.replace(assembly, capacity=small), rows)
    except torch.cuda.OutOfMemoryError as error:
        raise OctavoError(
            f"{device}: a step of {rows} rows does not fit beside the weights. Lower --chunk or --max-requests, load "
            "fewer layers (--layers), or share the model over more --ranks."
        ) from error


def _measured(assembly: Assembly, rows: int) -> int:
    device, pages = assembly.device, assembly.capacity.sizes.pages
    runner = Runner(assembly, {False: (rows,)}, "eager")
    buffers = runner.programs.buffer_bytes
    runner.set_pages([(0, page, page) for page in range(pages)])
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = runner.run([Chunk(slot=0, start=0, ids=[0] * rows)])
    logits = runner.logits(hidden, list(range(min(assembly.capacity.sizes.slots, rows))))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    sample(logits, [_DRAW] * len(logits)).read()
    drawing = torch.cuda.max_memory_allocated(device) - before
    del runner, hidden, logits
    torch.cuda.empty_cache()
    return buffers + int(RESERVE * peak) + drawing
