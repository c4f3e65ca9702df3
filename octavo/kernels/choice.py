"""Which backend computes each operator: decided once at start-up, by numerics and by what the device can run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

import torch

from octavo.kernels.operator import OPERATORS, ModelWidths

_LOG = logging.getLogger("octavo.kernels")

Numerics = Literal["reference", "fast", "plain"]
"""The named modes of design section 8. ``reference`` and ``plain`` differ in the dtype of activations alone."""

_PREFERENCE: dict[Numerics, tuple[str, ...]] = {
    "reference": ("reference",),
    "plain": ("reference",),
    "fast": ("triton", "torch", "reference"),
}
"""Backends from the best on. An operator that sums nothing has its reference alone, which is right in every mode."""

LEAST_CAPABILITY = {"triton": (9, 0)}
"""Compute capability from which on a GPU runs a backend's kernels: these contain instructions of Hopper."""


def choose_backends(numerics: Numerics, device: str, widths: ModelWidths | None = None) -> dict[str, str]:
    """Backend name of every operator: the first preferred one that the operator has on this device, ``cpu``, ``cuda``
    or ``cuda:N``.

    A backend that the device cannot run, or that refuses a model of these ``widths``, is passed over, and the log says
    why. Collectives are carried out by a communicator and have none.
    """
    kind = torch.device(device).type
    preferred = [backend for backend in _PREFERENCE[numerics] if kind != "cuda" or _runs(backend, device)]
    chosen = {}
    for name, known in OPERATORS.items():
        if known.contract.collective:
            continue
        able = [b for b in preferred if b in known.backends and kind in known.backends[b].devices]
        for backend in able:
            reason = None if widths is None else known.backends[backend].refuses(widths)
            if reason is None:
                chosen[name] = backend
                break
            _LOG.warning("%s: backend %s refuses this model: %s", name, backend, reason)
    return chosen


def _runs(backend: str, device: str) -> bool:
    """Whether a GPU is new enough. Where there is none, backends are chosen for another machine's."""
    least = LEAST_CAPABILITY.get(backend)
    if least is None or not torch.cuda.is_available():
        return True
    capability = torch.cuda.get_device_capability(device)
    if capability < least and any(backend in known.backends for known in OPERATORS.values()):
        _LOG.warning(
            "%s has compute capability %d.%d: the backend %s needs %d.%d or newer, another one computes instead",
            *(device, *capability, backend, *least),
        )
    return capability >= least


def describe_backends(backends: Iterable[str]) -> str:
    """``22 operators by torch, 3 by reference``."""
    counts: dict[str, int] = {}
    for backend in backends:
        counts[backend] = counts.get(backend, 0) + 1
    (first, count), *others = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join([f"{count} operators by {first}", *(f"{number} by {name}" for name, number in others)])
