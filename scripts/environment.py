"""Create or update a virtual environment that holds Octavo, never putting a CPU build of torch before a CUDA one.

    PYTHON scripts/environment.py DIRECTORY PIP_ARGUMENT...

Without a CUDA build of torch under PYTHON, ``constraints.txt`` fixes the versions. With one, the environment sees
PYTHON's packages, keeps every one of them that satisfies Octavo, and torch itself is pinned to the version there.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

SUPPORTED = ((3, 11), (3, 12))
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def cuda_torch() -> Path | None:
    """The directory of packages with this interpreter's torch, if that torch is a CUDA build."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return Path(torch.__file__).parents[1] if torch.version.cuda else None


def constraints_beside_installed() -> str:
    """``constraints.txt`` without the packages that this interpreter has, and with its torch."""
    installed = {_normalised(distribution.name) for distribution in importlib.metadata.distributions()}
    pins = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "==" in line]
    kept = [pin for pin in pins if _normalised(pin.partition("==")[0]) not in installed]
    return "\n".join([f"torch=={importlib.metadata.version('torch')}", *kept]) + "\n"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _output(python: Path, code: str) -> str:
    """What ``code`` prints under ``python``, or the empty string if it fails."""
    return subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def make_cuda_environment(directory: Path, packages: Path) -> Path:
    """An environment that sees this interpreter's packages. Returns its constraints file."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", directory], check=True)
    python = directory / "bin" / "python"
    find = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    if not _output(python, find).strip():
        # PYTHON is a virtual environment itself: its packages are not the system's, so they are named by path.
        site_packages = _output(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        (Path(site_packages) / "octavo_base_packages.pth").write_text(f"{packages}\n", encoding="utf-8")
    constraints = directory / "constraints.txt"
    constraints.write_text(constraints_beside_installed(), encoding="utf-8")
    return constraints


def main(directory: Path, pip_arguments: list[str]) -> None:
    if sys.version_info[:2] not in SUPPORTED:
        sys.exit(
            f"Octavo needs Python 3.11 or 3.12; {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=python3.12 ..."
        )
    python = directory / "bin" / "python"
    packages = cuda_torch()
    if packages is None:
        print(f"{directory}: installing the versions of {CONSTRAINTS.name} (about a minute)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        constraints = CONSTRAINTS
    else:
        print(f"{directory}: installing beside the CUDA build of torch in {packages}", flush=True)
        constraints = make_cuda_environment(directory, packages)
    install = ["-m", "pip", "install", "-qq", "--constraint", str(constraints), *pip_arguments]
    if subprocess.run([python, *install]).returncode:
        sys.exit(f"{directory}: pip failed, see above")
    build = _output(python, "import torch; print(torch.__version__, torch.version.cuda)").strip()
    if not build or (packages is not None and build.endswith("None")):
        sys.exit(f"{directory}: the torch there is {build or 'not importable'}, not the CUDA build in {packages}")
    print(f"{directory}: torch {build.removesuffix(' None')}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: PYTHON scripts/environment.py DIRECTORY PIP_ARGUMENT...")
    main(Path(sys.argv[1]), sys.argv[2:])
