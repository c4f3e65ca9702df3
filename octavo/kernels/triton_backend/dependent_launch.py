"""Kernels that start before the one ahead has ended (programmatic dependent launch): the wait for a launch is saved.

Such a kernel is launched with ``launch_pdl``, and each of its programs calls :func:`wait_for_ahead` before it reads or
writes anything. Then no kernel ends before all that stand ahead have ended. Any kernel may let the next start early,
the last of an operator too: whoever comes behind is ordinary, and starts when all is over, or waits itself.

Directly behind a collective, or the end of a call on a second stream (``graphs/beside.py``), which are events of
another stream, no such kernel may stand unless that is tested: today ordinary ones stand there, ``combine`` behind the
latter.
"""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_ahead() -> None:
    """Until the kernel ahead has ended and what it wrote can be read."""
    gdc_wait()


@triton.jit
def let_next_start() -> None:
    """The next kernel may start once every program of this one has called this."""
    gdc_launch_dependents()
