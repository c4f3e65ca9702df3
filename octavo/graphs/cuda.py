"""Capturing segments as CUDA graphs: one stream, one private pool, nothing collected meanwhile (design section 5).

Blocks of a pool belong to a stream, so one stream for all captures lets later segments take what earlier ones gave
back; calls that run beside others have another one, the same for a whole program. Everything that a graph reads has to
outlive it: the program that asks for captures holds its buffers, weights and pools.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from octavo.errors import OctavoError
from octavo.graphs.features import input_liveness


class Recorder:
    """Captures what is run on it. All programs of an engine share one."""

    def __init__(self, device: torch.device, debug: bool = False) -> None:
        """With ``debug`` a replay whose inputs were freed is an error, where torch can tell (``features.py``)."""
        self.device = device
        self._options = {"check_input_liveness": True} if debug and input_liveness().found else {}
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Captures happen in here, and what prepares them, on the recorder's stream.

        The garbage collector is off: a CUDA graph that it finds would be destroyed amid a capture, which is an error.
        Raises :class:`OctavoError` with the remedies when the device's memory is used up.
        """
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.stream(self._stream):
                yield
            torch.cuda.synchronize(self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise OctavoError(
                f"{self.device}: out of memory while capturing CUDA graphs ({_first_line(error)}). Leave more room: "
                "lower --memory-fraction or --kv-tokens, lower --chunk, or capture fewer or smaller --buckets."
            ) from error
        finally:
            if collecting:
                gc.enable()

    def record(self, run: Callable[[], None], title: str) -> torch.cuda.CUDAGraph:
        """What ``run`` launches, as a graph. Call it in a session. Raises :class:`OctavoError` naming ``title``."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, another engine's among them, may allocate and copy meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local", **self._options)
        try:
            run()
        except torch.cuda.OutOfMemoryError:
            _abandon(graph)
            raise
        except RuntimeError as error:
            _abandon(graph)
            raise OctavoError(
                f"{title} cannot be captured on {self.device}: {_first_line(error)}. See what `octavo doctor` says of "
                "this GPU; --graphs eager runs without captures."
            ) from error
        graph.capture_end()
        return graph

    def pool_bytes(self) -> int:
        """Device memory that the private pool holds: the temporaries of all captured segments."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that failed; it reports the failure once more."""
    try:
        graph.capture_end()
    except RuntimeError:
        return


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
