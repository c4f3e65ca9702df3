"""Compiles what a call of Triton kernels would launch on an H200, on a machine that has none."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024
"""Of one program."""
REGISTERS = 65536
"""Of a multiprocessor."""
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_TOUCHES_OR_LEAVES = re.compile(r"(@\S+ +)?(LD|LDG|LDGSTS|ST|STG|ATOM\w*|RED\w*|UTMA\w*|UBLK\w*|BR\w*|CALL|RET|EXIT)\b")


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch: its kernel, and what ptxas made of it."""

    kernel: str
    programs: tuple[int, ...]
    threads: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    ptx: str
    layouts: str
    """Triton's own code for the GPU, with the layout of every tensor."""
    binary: bytes

    @property
    def machine_code(self) -> list[str]:
        return _of_binary(self.binary, "nvdisasm", "-c").splitlines()


@contextmanager
def launches_compiled() -> Iterator[list[Launched]]:
    """While it is active, launches compile for sm_90 and do nothing; the list fills up with them."""
    launched: list[Launched] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        launched.append(_describe(self.__name__, grid, compiled))
        return compiled

    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(driver, "_active", _Driver()),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
    ):
        yield launched


def check_that_it_fits(launched: Iterable[Launched], stack_bytes: int = 0) -> None:
    """A multiprocessor holds a program of every launch, and no thread keeps more than ``stack_bytes`` in memory."""
    for one in launched:
        what = f"{one.kernel} of {one.programs}: {one.registers} registers, {one.shared_bytes} bytes shared"
        assert one.shared_bytes <= SHARED_BYTES, what
        assert one.registers * one.threads <= REGISTERS, what
        assert one.stack_bytes <= stack_bytes, f"{what}, {one.stack_bytes} bytes spilled"


def check_dependence(one: Launched, what: str, waits: bool, lets_start: bool) -> None:
    """The rule of ``dependent_launch``: a kernel that ``waits`` does so before it touches memory, branches or ends, so
    that the order of the machine code is that of its execution. ``lets_start``: the next one may start early."""
    code = [found[1] for line in one.machine_code if (found := _INSTRUCTION.search(line))]
    assert ("ACQBULK" in code) == waits, f"{what}: whether it waits"
    if waits:
        ahead = code[: code.index("ACQBULK")]
        assert not [line for line in ahead if _TOUCHES_OR_LEAVES.match(line)], f"{what}: it waits too late"
    assert any("PREEXIT" in line for line in code) == lets_start, f"{what}: whether it lets the next start"


def loops_with(launched: Launched, instruction: str) -> list[list[str]]:
    """Innermost loops of the machine code that hold an instruction of this name."""
    starts: dict[str, int] = {}
    code: list[str] = []
    loops: list[range] = []
    for line in launched.machine_code:
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            starts[label[1]] = len(code)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(found[1])
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", found[1])
            if target and target[1] in starts:
                loops.append(range(starts[target[1]], len(code)))
    inner = [a for a in loops if not any(b != a and a.start <= b.start and b.stop <= a.stop for b in loops)]
    bodies = [[code[i] for i in loop] for loop in inner]
    return [body for body in bodies if any(instruction in line for line in body)]


class _Driver:
    """As much of a driver as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _describe(kernel: str, grid: tuple[int, ...], compiled: Any) -> Launched:
    usage = _of_binary(compiled.asm["cubin"], "cuobjdump", "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Launched(
        kernel=kernel,
        programs=tuple(grid),
        threads=32 * compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        ptx=compiled.asm["ptx"],
        layouts=compiled.asm["ttgir"],
        binary=compiled.asm["cubin"],
    )


@functools.cache  # launches share binaries, and not every test reads machine code
def _of_binary(binary: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_TOOLS / tool), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
