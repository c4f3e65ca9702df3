"""Backend ``triton`` of ``mhc_mix`` and ``mhc_site`` in Triton's interpreter: what a CPU can tell of it.

Products on tensor cores and the approximate reciprocal need the GPU: ``tests/gpu/test_triton_mhc.py`` and
``test_triton_mhc_site.py``.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.kernels.run_interpreted import run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter(long_form: bool) -> None:
    assert run_interpreted("interpreted_mhc", long_form).endswith("coefficients agree\n")


@pytest.mark.timeout(300)
def test_a_site_in_the_interpreter(long_form: bool) -> None:
    assert run_interpreted("interpreted_mhc_site", long_form).endswith("sites agree\n")
