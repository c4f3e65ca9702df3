"""The kernels of what stands before the body, and of ``window_latent``, compile for an H200 at true shapes, move memory
in wide pieces, and fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend.engram_hash import engram_hash_triton
    from octavo.kernels.triton_backend.latent import window_latent_triton
    from octavo.kernels.triton_backend.lookups import embed_tokens_triton, engram_lookup_triton, token_classes_triton
    from tests.kernels.compiled_launches import Launched, check_dependence, check_that_it_fits, launches_compiled

ROWS = 300


def embed(rows: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> None:
    embed_tokens_triton(integers(rows), torch.empty(999, hidden, dtype=torch.bfloat16), dtype)


def classes(rows: int) -> None:
    token_classes_triton(integers(rows), torch.empty(rows, dtype=torch.bool), integers(999))


def hashes(rows: int, orders: int, heads: int) -> None:
    step = {name: torch.empty(rows, dtype=torch.int32) for name in ("write_slots", "write_positions", "write_starts")}
    columns = integers(orders * heads)
    engram_hash_triton(integers(rows), integers(8, orders), columns, columns, integers(orders + 1), **step, pad_class=2)


def lookup(rows: int, columns: int, width: int, dtype: torch.dtype = torch.bfloat16) -> None:
    table = torch.empty(99, width, dtype=torch.float8_e4m3fn)
    engram_lookup_triton(table, torch.empty(99, width // 32, dtype=torch.uint8), integers(rows, columns), dtype)


def latents(rows: int, head_dim: int, turning: int) -> None:
    window_latent_triton(**latent_arguments(rows, head_dim, turning))


def latent_arguments(rows: int, head_dim: int, turning: int) -> dict[str, Any]:
    return {
        "x": torch.empty(rows, head_dim, dtype=torch.bfloat16),
        "weight": torch.empty(head_dim, dtype=torch.bfloat16),
        "positions": torch.empty(rows, dtype=torch.int32),
        "frequencies": torch.empty(turning),
        "epsilon": 1e-20,
    }


def integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def compiled(call: Callable[..., None], *arguments: Any) -> list[Launched]:
    with launches_compiled() as launched:
        call(*arguments)
    return launched


TRUE_SHAPES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "embed_rows": (embed, (ROWS, 5120)),
    "look_up_classes": (classes, (ROWS,)),
    "hash_rows": (hashes, (ROWS, 3, 8)),
    "look_up_rows": (lookup, (ROWS, 24, 256)),
    "make_latents": (latents, (ROWS, 512, 32)),
}


@pytest.fixture(scope="module")
def at_true_shapes() -> dict[str, Launched]:
    """By kernel: each operator launches one."""
    found = {}
    for name, (call, arguments) in TRUE_SHAPES.items():
        (one,) = compiled(call, *arguments)
        assert one.kernel == name
        found[name] = one
    return found


# Angles from a hundred thousand on are reduced by a table, which lies on the stack.
@pytest.mark.parametrize(
    ("kernel", "stack_bytes"), [(name, 32 if name == "make_latents" else 0) for name in TRUE_SHAPES]
)
def test_one_kernel_that_fits(at_true_shapes: dict[str, Launched], kernel: str, stack_bytes: int) -> None:
    check_that_it_fits([at_true_shapes[kernel]], stack_bytes)
    assert at_true_shapes[kernel].registers <= 128
    amid_a_step = kernel == "make_latents"
    check_dependence(at_true_shapes[kernel], kernel, waits=amid_a_step, lets_start=amid_a_step)


@pytest.mark.parametrize(
    ("kernel", "loaded", "stored"),
    [("embed_rows", 128, 128), ("look_up_rows", 64, 128), ("make_latents", 128, 128)],
)
def test_rows_move_in_wide_pieces(at_true_shapes: dict[str, Launched], kernel: str, loaded: int, stored: int) -> None:
    """Bits a thread loads or stores at once: what carries most of the bytes."""
    code = "\n".join(at_true_shapes[kernel].machine_code)
    assert re.search(rf"LDG\.E[.\w]*\.{loaded}\b", code) and re.search(rf"STG\.E[.\w]*\.{stored}\b", code)
    assert not re.search(r"STG\.E\.U(8|16)", code)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (embed, (1, 5120)),
        (embed, (3, 288)),
        (embed, (3, 128, torch.float32)),
        (classes, (1,)),
        (hashes, (1, 3, 8)),
        (hashes, (5, 1, 3)),
        (lookup, (1, 24, 256)),
        (lookup, (3, 9, 96)),
        (lookup, (3, 6, 32, torch.float32)),
        (latents, (1, 512, 32)),
        (latents, (5, 96, 16)),
        (latents, (5, 64, 5)),
        (latents, (5, 32, 16)),
        (latents, (2, 1056, 8)),
    ],
)
def test_other_shapes_compile(call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    check_that_it_fits(compiled(call, *arguments), stack_bytes=32)


def test_no_rows_launch_nothing() -> None:
    for call, arguments in TRUE_SHAPES.values():
        assert not compiled(call, 0, *arguments[1:])


def test_latents_that_are_not_bf16_are_refused() -> None:
    given = latent_arguments(2, 64, 16)
    with pytest.raises(TypeError, match=r"x is torch\.float32; allowed: torch\.bfloat16.*numerics reference"):
        window_latent_triton(**given | {"x": given["x"].float()})


def test_tables_whose_rows_are_apart_are_refused() -> None:
    table = torch.empty(9, 128, dtype=torch.float8_e4m3fn)[:, :64]
    with pytest.raises(ValueError, match=r"engram_lookup.*table has strides \(128, 1\).*contiguous"):
        engram_lookup_triton(table, torch.empty(9, 2, dtype=torch.uint8), integers(2, 3), torch.bfloat16)
    with pytest.raises(ValueError, match=r"embed_tokens.*weight has strides"):
        embed_tokens_triton(integers(2), torch.empty(9, 64, dtype=torch.bfloat16)[:, ::2], torch.bfloat16)
    columns, step = integers(3), torch.empty(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"engram_hash.*history has strides"):
        engram_hash_triton(
            integers(2), integers(8, 6)[:, ::2], columns, columns, integers(4), step, step, step, pad_class=2
        )
