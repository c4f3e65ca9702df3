"""Triton's interpreter for modules of tests. It is chosen before Triton is imported: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

SECONDS = 290
"""That a run may take, less than the time of its test."""


def run_interpreted(module: str, long_form: bool) -> str:
    """What ``tests.kernels.MODULE`` prints, with the argument ``long`` or none; fails with its last words if it fails.

    Skips where the interpreter cannot loop up to a number that was loaded.
    """
    triton, numpy = version("triton"), version("numpy")
    if Version(triton) < Version("3.7") and Version(numpy) >= Version("2.4"):
        pytest.skip(f"the interpreter of Triton {triton}, before 3.7, does not fit NumPy {numpy}, from 2.4 on")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{module}", *(["long"] if long_form else [])],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def pretend_to_have_processors(count: int) -> None:
    """For the rest of such a process: kernels are cut for a device of so many multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=count)
    vars(torch.cuda).update(get_device_properties=lambda device: properties)


def launch_one_after_another(bodies: Iterable[ModuleType], launches: Mapping[ModuleType, tuple[str, ...]]) -> None:
    """For the rest of such a process: the ``bodies``' kernels wait for nobody, and ``launches`` of kernels, by the
    module that launches them, are made without options that the interpreter does not know."""
    for module in bodies:
        vars(module).update(dict.fromkeys(("let_next_start", "wait_for_ahead"), _nothing))
    for module, names in launches.items():
        vars(module).update({name: _WithoutOptions(vars(module)[name]) for name in names})


def _nothing(*arguments: Any) -> None:
    """Kernels run one after the other here."""


class _WithoutOptions:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            options = ("enable_reflect_ftz", "enable_fp_fusion", "launch_pdl")
            return self._kernel[grid](*args, **{name: value for name, value in kwargs.items() if name not in options})

        return launch
