"""What ``octavo doctor`` looks at: is everything there that Octavo needs, and if not, what mends it.

Supported versions are read from the installed distribution's own metadata; there is no second list of them. Torch is
imported where it is used, so that its absence can be reported too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from octavo.errors import OctavoError
from octavo.runtime.config import EngineConfig

_DEVELOPMENT_EXTRAS = frozenset({"dev", "test"})
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    detail: str
    """What was found; a table has several lines."""
    remedy: str = ""
    """The command or step that mends it; empty when nothing needs mending."""
    required: bool = True
    """Whether Octavo cannot work without it."""


def run_checks() -> list[Check]:
    """All checks of this machine, in the order of the report. Without torch, only those of the packages."""
    try:
        packages = package_checks(importlib.metadata.distribution("octavo"))
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install -e . (in the directory of pyproject.toml)"
        packages = [Check(name="octavo", ok=False, detail="not installed: no version ranges known", remedy=remedy)]
    packages.append(_package_check(Requirement("triton"), required=False))
    if importlib.util.find_spec("torch") is None:
        return packages
    return [*packages, cpu_check(), *cuda_checks(), *compiler_checks(), *backend_checks()]


def exit_code(checks: Iterable[Check]) -> int:
    """1 if something required fails, else 0."""
    return int(any(check.required and not check.ok for check in checks))


def package_checks(distribution: Distribution) -> list[Check]:
    """Python and every package that ``distribution`` requires, against the ranges it states.

    Packages of an extra are optional: absent is fine, present in a wrong version is not. Development extras are
    left out.
    """
    python = platform.python_version()
    supported = SpecifierSet((distribution.metadata.get_all("Requires-Python") or [""])[0])
    fits = supported.contains(python, prereleases=True)
    detail = python if fits else f"{python}, supported is {supported}"
    remedy = "" if fits else f"install Octavo with a Python {supported}"
    checks = {"python": Check(name="python", ok=fits, detail=detail, remedy=remedy)}
    extras = set(distribution.metadata.get_all("Provides-Extra") or ()) - _DEVELOPMENT_EXTRAS
    for requirement in map(Requirement, distribution.requires or ()):
        marker = requirement.marker
        required = marker is None or marker.evaluate({"extra": ""})
        if required or (marker and any(marker.evaluate({"extra": extra}) for extra in extras)):
            checks.setdefault(requirement.name, _package_check(requirement, required=required))
    return list(checks.values())


def _package_check(requirement: Requirement, *, required: bool) -> Check:
    remedy = f'pip install "{requirement.name}{requirement.specifier}"'
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        detail = "not installed" if required else "not installed (optional)"
        remedy = remedy if required else ""
        return Check(name=requirement.name, ok=not required, detail=detail, remedy=remedy, required=required)
    if requirement.specifier.contains(version, prereleases=True):
        return Check(name=requirement.name, ok=True, detail=version, required=required)
    detail = f"{version}, supported is {requirement.specifier}"
    return Check(name=requirement.name, ok=False, detail=detail, remedy=remedy, required=required)


def model_checks(config: EngineConfig) -> list[Check]:
    """What every rank of ``config`` would hold, and whether there is memory for it here. Loads nothing.

    Several ranks may be planned on a machine without GPUs for one that has them, so too little memory is no failure.
    """
    from octavo.runtime.rank_plan import fitting_ranks, plan_ranks

    try:
        planned = plan_ranks(config, every_device=True)
    except OctavoError as error:
        return [Check(name="model", ok=False, detail=str(error), remedy="correct the options above")]
    one, ranks = planned.first, config.ranks
    text = one.config.text_config
    weights = (
        f"{text.num_hidden_layers} layers, {planned.ranks[-1].planned.experts.stop} of {text.n_routed_experts} experts"
        f"{f' on {ranks} ranks' if ranks > 1 else ''}: {ranks * one.weight_bytes / _GIB:.2f} GiB on {one.device.type}"
    )
    place = "each GPU, at least" if planned.sharers < ranks else str(one.device)
    needed = planned.needed_bytes + (one.shared_bytes if one.device.type == "cpu" else 0)
    memory = f"{needed / _GIB:.2f} GiB needed, {planned.free_bytes / _GIB:.2f} GiB available on {place}"
    missing = sum(rank.free_bytes is None for rank in planned.ranks)
    if missing:
        memory = f"{needed / _GIB:.2f} GiB needed on each GPU; {missing} of {ranks} GPUs are not there"
    if one.shared_bytes and one.device.type != "cpu":
        memory += f"; Engram tables need {one.shared_bytes / _GIB:.2f} GiB of the host"
    remedy = "fewer --layers or --experts, smaller --kv-tokens or --chunk, or another --device"
    return [
        Check(name="model", ok=True, detail=weights),
        Check(name="state", ok=True, detail=one.capacity.describe() + (" (each rank)" if ranks > 1 else "")),
        *([Check(name="ranks", ok=True, detail="\n".join(planned.lines()))] if ranks > 1 else []),
        Check(
            name="memory",
            ok=planned.fits,
            detail=memory,
            remedy="" if planned.fits else f"{remedy}. {fitting_ranks(config)}",
            required=ranks == 1 or one.device.type == "cuda",
        ),
    ]


def cpu_check() -> Check:
    """Cores that this process may use, and memory available now."""
    kib = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    memory = f"{int(kib[1]) * 1024 / _GIB:.1f} GiB of memory free" if kib else "free memory unknown"
    return Check(name="cpu", ok=True, detail=f"{len(os.sched_getaffinity(0))} cores, {memory}")


def cuda_checks() -> list[Check]:
    """One check for each GPU, which runs a kernel on it; or one that says why there is none. None is required."""
    import torch

    if torch.version.cuda is None:
        detail = f"none: torch {torch.__version__} is a build without CUDA"
        if shutil.which("nvidia-smi") is None:
            return [Check(name="cuda", ok=True, detail=detail, required=False)]
        remedy = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        return [Check(name="cuda", ok=False, detail=f"{detail}, but there is a driver", remedy=remedy, required=False)]
    try:
        torch.cuda.current_device()
    except RuntimeError as error:
        remedy = "install the NVIDIA driver until nvidia-smi lists the GPU; without one Octavo runs on the CPU"
        return [Check(name="cuda", ok=False, detail=f"none: {_line(error)}", remedy=remedy, required=False)]
    return [_gpu_check(index) for index in range(torch.cuda.device_count())]


def _gpu_check(index: int) -> Check:
    import torch

    properties = torch.cuda.get_device_properties(index)
    detail = f"{properties.name}, capability {properties.major}.{properties.minor}"
    try:
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        remedy = "free the GPU, or install a torch build that supports this capability"
        detail = f"{detail}, but no kernel runs: {_line(error)}"
        return Check(name=f"cuda:{index}", ok=False, detail=detail, remedy=remedy, required=False)
    detail = f"{detail}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    return Check(name=f"cuda:{index}", ok=True, detail=detail, required=False)


def compiler_checks() -> list[Check]:
    """What Inductor compiles with on the CPU, and the CUDA compilers where there is a GPU.

    Not required: what is not compiled runs as plain PyTorch.
    """
    import torch
    from torch._inductor import config as inductor_config

    candidates = [name for name in inductor_config.cpp.cxx if name is not None]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    found = headers.is_file()
    detail, remedy = (str(headers), "") if found else (f"no {headers}", "apt-get install python3-dev")
    checks = [
        _tool_check("c++ compiler", candidates, remedy="apt-get install g++"),
        Check(name="python headers", ok=found, detail=detail, remedy=remedy, required=False),
    ]
    if torch.cuda.is_available():
        for tool in ("nvcc", "ptxas"):
            remedy = f"install the CUDA toolkit {torch.version.cuda} and put its bin directory on PATH"
            checks.append(_tool_check(tool, [tool, f"/usr/local/cuda/bin/{tool}"], remedy=remedy))
    return checks


def _tool_check(name: str, candidates: list[str], *, remedy: str) -> Check:
    """The first of ``candidates`` that can be run."""
    for path in filter(None, map(shutil.which, candidates)):
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        version = re.search(r"\d+(\.\d+)+", answer)
        return Check(name=name, ok=True, detail=f"{path} {version[0] if version else ''}".strip(), required=False)
    return Check(name=name, ok=False, detail=f"none of {', '.join(candidates)}", remedy=remedy, required=False)


def _probe_reference() -> str:
    """The stored types of a checkpoint must be readable (spec/model.md 2)."""
    import torch

    torch.ones(32).to(torch.float8_e4m3fn).to(torch.float32)
    torch.zeros(1, dtype=torch.uint8).view(torch.float8_e8m0fnu).to(torch.float32)
    return "plain PyTorch, on every device"


def _probe_torch() -> str:
    """Grouped products, on a GPU without waiting for the host: kernels for that exist from Hopper on."""
    import torch

    if not hasattr(torch.nn.functional, "grouped_mm"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if major not in (9, 10):
            raise RuntimeError(f"cuda:{index} has capability {major}.{minor}; grouped products need 9 or 10")
    return "numerics fast: BF16 products by PyTorch, capturable on GPUs of capability 9 and 10"


def _probe_triton() -> str:
    """Kernels for Hopper: on other machines the backend ``torch`` computes the same operators."""
    import torch

    from octavo.kernels.choice import LEAST_CAPABILITY

    least = LEAST_CAPABILITY["triton"]
    needed = f"capability {least[0]}.{least[1]} or newer"
    if not torch.cuda.is_available():
        return f"numerics fast: kernels for GPUs of {needed}; none here"
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("the package triton is not installed; the backend torch computes instead")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) < least:
            raise RuntimeError(
                f"cuda:{index} has capability {major}.{minor}, the kernels need {needed}; the backend torch computes "
                "instead"
            )
    return f"numerics fast: kernels for GPUs of {needed}"


BACKENDS: dict[str, Callable[[], str]] = {
    "reference": _probe_reference,
    "torch": _probe_torch,
    "triton": _probe_triton,
}
"""For each backend a probe that describes it, or raises RuntimeError saying why it cannot run here."""

_REMEDIES = {"triton": "install triton, and use a GPU of the capability that the kernels need"}
_REMEDY = "install a supported torch, or use --numerics reference"


def backend_checks() -> list[Check]:
    """Which kernel backends can run here. Only ``reference`` is required."""
    checks = []
    for name, probe in BACKENDS.items():
        ok, detail, remedy, required = True, "", "", name == "reference"
        try:
            detail = probe()
        except RuntimeError as error:
            ok, detail, remedy = False, _line(error), _REMEDIES.get(name, _REMEDY)
        checks.append(Check(name=f"backend {name}", ok=ok, detail=detail, remedy=remedy, required=required))
    return checks


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
