"""Available memory, from made-up ``/proc`` and control group trees and on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.errors import OctavoError, UsageError
from octavo.model.memory import available_memory, check_memory, host_memory

GIB = 1 << 30
CPU = torch.device("cpu")


def plant(root: Path, groups: str, **files: str) -> tuple[Path, Path]:
    """A machine with 100 GiB available; ``files`` are paths below the control groups, ``__`` for a slash."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(
        f"MemTotal:  {200 * GIB // 1024} kB\nMemAvailable:  {100 * GIB // 1024} kB\n"
    )
    (root / "proc" / "self" / "cgroup").write_text(groups)
    (root / "cgroup").mkdir()
    for name, text in files.items():
        file = root / "cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root / "proc", root / "cgroup"


def test_without_limits(tmp_path: Path) -> None:
    assert host_memory(*plant(tmp_path, "0::/\n")) == 100 * GIB


def test_version_2_limit(tmp_path: Path) -> None:
    """10 GiB less 4 used, 1 of which are file pages that can go."""
    trees = plant(
        tmp_path,
        "0::/a/b\n",
        a__b__memory_max=str(10 * GIB),
        a__b__memory_current=str(4 * GIB),
        a__b__memory_stat=f"anon 5\ninactive_file {GIB}",
    )
    assert host_memory(*trees) == 7 * GIB


def test_limit_of_an_outer_group(tmp_path: Path) -> None:
    trees = plant(
        tmp_path,
        "0::/a/b\n",
        a__b__memory_max="max",
        a__b__memory_current="0",
        a__b__memory_stat="anon 0",
        a__memory_max=str(3 * GIB),
        a__memory_current=str(GIB),
        a__memory_stat="anon 5",
    )
    assert host_memory(*trees) == 2 * GIB


def test_limit_in_a_container(tmp_path: Path) -> None:
    """The process names its group as the host does, but only the container's root is mounted."""
    trees = plant(
        tmp_path,
        "0::/docker/0123\n",
        memory_max=str(5 * GIB),
        memory_current=str(GIB),
        memory_stat="inactive_file 0",
    )
    assert host_memory(*trees) == 4 * GIB


def test_version_1_limit(tmp_path: Path) -> None:
    trees = plant(
        tmp_path,
        "12:cpu,cpuacct:/a\n7:memory:/a\n",
        memory__a__memory_limit_in_bytes=str(6 * GIB),
        memory__a__memory_usage_in_bytes=str(2 * GIB),
        memory__a__memory_stat="inactive_file 0",
    )
    assert host_memory(*trees) == 4 * GIB


def test_group_over_its_limit(tmp_path: Path) -> None:
    trees = plant(tmp_path, "0::/\n", memory_max=str(GIB), memory_current=str(2 * GIB), memory_stat="inactive_file 0")
    assert host_memory(*trees) == 0


def test_this_machine() -> None:
    available = available_memory(CPU)
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available <= total
    check_memory(available // 2, CPU)
    with pytest.raises(
        OctavoError, match=r"cpu: .* GiB are needed, .* GiB are available.*--layers.*--kv-tokens.*--device"
    ):
        check_memory(2 * total, CPU)


def test_numbers_in_the_message() -> None:
    with pytest.raises(OctavoError, match=r"cpu: 486666.50 GiB are needed"):
        check_memory(486_666 * GIB + GIB // 2, CPU)


def test_other_devices() -> None:
    with pytest.raises(UsageError, match="device meta: expected cpu or cuda"):
        available_memory(torch.device("meta"))
