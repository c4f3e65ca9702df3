"""The doctor: what it finds here, and what it says of machines that lack something."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import sysconfig
from importlib.metadata import PathDistribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from octavo.runtime import doctor
from octavo.runtime.doctor import Check


def by_name(checks: list[Check]) -> dict[str, Check]:
    named = {check.name: check for check in checks}
    assert len(named) == len(checks)
    return named


def distribution(folder: Path, *lines: str) -> PathDistribution:
    info = folder / "octavo-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", "Name: octavo", "Version: 1", *lines, ""]))
    return PathDistribution(info)


def program(folder: Path, name: str, script: str) -> str:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_this_machine() -> None:
    checks = by_name(doctor.run_checks())
    assert {"triton", "cpu", "c++ compiler", "python headers", "backend reference"} < set(checks)
    assert checks["backend reference"].ok
    assert checks["cpu"].ok
    assert all(bool(check.remedy) != check.ok for check in checks.values())
    assert all(check.detail for check in checks.values())


def test_packages_are_held_to_the_ranges_of_the_distribution(tmp_path: Path) -> None:
    checks = by_name(
        doctor.package_checks(
            distribution(
                tmp_path,
                "Requires-Python: >=3.11",
                "Provides-Extra: dev",
                "Provides-Extra: gpu",
                "Requires-Dist: numpy>=1",
                "Requires-Dist: torch<2,>=1",
                "Requires-Dist: no-such-package-1<4",
                "Requires-Dist: no-such-package-2; sys_platform == 'amiga'",
                "Requires-Dist: no-such-package-3>=3; extra == 'gpu'",
                "Requires-Dist: rich<1; extra == 'gpu'",
                "Requires-Dist: no-such-package-4; extra == 'dev'",
            )
        )
    )
    assert list(checks) == ["python", "numpy", "torch", "no-such-package-1", "no-such-package-3", "rich"]
    assert checks["python"].ok
    assert checks["numpy"].ok
    assert checks["numpy"].required
    assert checks["torch"] == Check(
        name="torch",
        ok=False,
        detail=f"{importlib.metadata.version('torch')}, supported is <2,>=1",
        remedy='pip install "torch<2,>=1"',
    )
    missing = checks["no-such-package-1"]
    assert (missing.ok, missing.required, missing.detail) == (False, True, "not installed")
    assert missing.remedy == 'pip install "no-such-package-1<4"'
    assert checks["no-such-package-3"].ok
    assert checks["no-such-package-3"].detail == "not installed (optional)"
    assert (checks["rich"].ok, checks["rich"].required) == (False, False)


def test_unsupported_python_is_named(tmp_path: Path) -> None:
    (check,) = doctor.package_checks(distribution(tmp_path, "Requires-Python: <3.0"))
    assert not check.ok
    assert check.required
    assert check.detail.endswith(", supported is <3.0")
    assert check.remedy == "install Octavo with a Python <3.0"


def test_without_torch_the_packages_are_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checks = by_name(doctor.run_checks())
    assert "triton" in checks
    assert "cpu" not in checks


def test_not_being_installed_fails_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    checks = doctor.run_checks()
    assert by_name(checks)["octavo"].remedy.startswith("pip install -e .")
    assert doctor.exit_code(checks) == 1


def test_only_required_failures_count() -> None:
    good = Check(name="a", ok=True, detail="")
    optional = Check(name="b", ok=False, detail="", required=False)
    assert doctor.exit_code([]) == doctor.exit_code([good, optional]) == 0
    assert doctor.exit_code([good, dataclasses.replace(optional, required=True)]) == 1


def test_build_of_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is fine on a machine without a driver, and worth a remedy on one that has it."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = doctor.cuda_checks()
    assert check.ok
    assert check.detail == f"none: torch {torch.__version__} is a build without CUDA"
    program(tmp_path, "nvidia-smi", "")
    (check,) = doctor.cuda_checks()
    assert (check.ok, check.required) == (False, False)
    assert "--index-url" in check.remedy


def test_cuda_build_without_a_driver_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system.\nMore.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", no_driver)
    (check,) = doctor.cuda_checks()
    assert (check.ok, check.required) == (False, False)
    assert check.detail == "none: Found no NVIDIA driver on your system."
    assert "nvidia-smi" in check.remedy


def test_each_gpu_has_a_line_and_a_kernel_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(_: int, device: str) -> torch.Tensor:
        if device == "cuda:1":
            raise RuntimeError("no kernel image is available\nfor execution")
        return torch.zeros(1)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=f"GPU {index}", major=9, minor=0)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 * 2**30, 4 * 2**30))
    monkeypatch.setattr(torch, "ones", ones)
    first, second = doctor.cuda_checks()
    assert first == Check(name="cuda:0", ok=True, detail="GPU 0, capability 9.0, 3.0 of 4.0 GiB free", required=False)
    assert (second.name, second.ok) == ("cuda:1", False)
    assert second.detail == "GPU 1, capability 9.0, but no kernel runs: no kernel image is available"
    assert second.remedy


@pytest.mark.gpu
def test_this_gpu() -> None:
    checks = by_name(doctor.cuda_checks())
    assert len(checks) == torch.cuda.device_count()
    assert checks["cuda:0"].ok
    assert torch.cuda.get_device_name(0) in checks["cuda:0"].detail
    assert {"nvcc", "ptxas"} < set(by_name(doctor.compiler_checks()))


def test_first_compiler_that_runs_is_named(tmp_path: Path) -> None:
    broken = program(tmp_path, "broken", "exit 1")
    works = program(tmp_path, "works", "echo 'works (Somewhere 12) 12.2.0'")
    with inductor_config.patch({"cpp.cxx": (None, str(tmp_path / "absent"), broken, works)}):
        check = by_name(doctor.compiler_checks())["c++ compiler"]
    assert (check.ok, check.detail) == (True, f"{works} 12.2.0")


def test_missing_compiler_and_headers_have_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nonexistent")
    with inductor_config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        checks = by_name(doctor.compiler_checks())
    assert checks["c++ compiler"] == Check(
        name="c++ compiler",
        ok=False,
        detail="none of no-such-compiler",
        remedy="apt-get install g++",
        required=False,
    )
    assert (checks["python headers"].ok, checks["python headers"].remedy) == (False, "apt-get install python3-dev")


def test_cuda_compilers_are_looked_for_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(
        tmp_path, "nvcc", "echo 'nvcc: compiler driver'; echo 'Copyright (c) 2005-2025'; echo 'release 13.0, V13.0.48'"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checks = by_name(doctor.compiler_checks())
    assert checks["nvcc"].detail == f"{tmp_path}/nvcc 13.0"
    assert "ptxas" in checks


@pytest.mark.parametrize(
    ("capabilities", "installed", "detail"),
    (
        ([], True, "numerics fast: kernels for GPUs of capability 9.0 or newer; none here"),
        ([(9, 0), (10, 0)], True, "numerics fast: kernels for GPUs of capability 9.0 or newer"),
        (
            [(9, 0), (8, 6)],
            True,
            "cuda:1 has capability 8.6, the kernels need capability 9.0 or newer; the backend torch computes instead",
        ),
        ([(9, 0)], False, "the package triton is not installed; the backend torch computes instead"),
    ),
)
def test_kernels_for_hopper(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], installed: bool, detail: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    check = by_name(doctor.backend_checks())["backend triton"]
    assert (check.detail, check.ok, check.required) == (detail, detail.startswith("numerics fast"), False)
    assert bool(check.remedy) != check.ok


def test_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise RuntimeError("no such type\nat line 1")

    monkeypatch.setitem(doctor.BACKENDS, "other", fails)
    checks = by_name(doctor.backend_checks())
    assert checks["backend reference"].ok
    assert (checks["backend other"].ok, checks["backend other"].required) == (False, False)
    assert checks["backend other"].detail == "no such type"
    monkeypatch.setitem(doctor.BACKENDS, "reference", fails)
    assert doctor.exit_code(doctor.backend_checks()) == 1
