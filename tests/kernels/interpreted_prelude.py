"""Triton's interpreter runs what stands before the body, and ``window_latent``, with TRITON_INTERPRET=1:
python -m tests.kernels.interpreted_prelude.

It truncates where F32 becomes BF16: latents stay F32 here, through norm, turn and Q8. Everything else is compared to
the bit. Prints what agrees, or raises.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.engram import DEAD_CLASS
from octavo.kernels.norm import rms
from octavo.kernels.quantise import dequantise_q8, quantise_q8
from octavo.kernels.rope import turn
from octavo.kernels.triton_backend import latent
from octavo.kernels.triton_backend.engram_hash import engram_hash_triton
from octavo.kernels.triton_backend.lookups import embed_tokens_triton, engram_lookup_triton, token_classes_triton
from tests.kernels.batches import SLOTS, Batch, Request, random_batch
from tests.kernels.calls import same_bits
from tests.kernels.cases import CASES, Arguments
from tests.kernels.draw import MINI, WIDE, Draw, Size
from tests.kernels.run_interpreted import launch_one_after_another
from tests.kernels.torch_calls import poisoned

BATCHES = (
    random_batch(1, seed=1),
    random_batch(2, seed=2),
    random_batch(17, seed=3),
    random_batch(300, seed=4),
    Batch(tuple(Request(slot, start, 1) for slot, start in enumerate((0, 1, 2, 3, 4, 5, 6, 250))), dead=3),
    Batch((Request(3, 37, 18), Request(1, 0, 2), Request(2, 1, 1), Request(6, 2, 40)), dead=1),
    Batch((), dead=2),
    Batch(()),
)
CODES_THAT_MOVE = 1e-3
"""Share of Q8 values that lie beside a rounding boundary: squares are added in another order, and NumPy's cosines and
sines are not torch's."""


def main(long_form: bool) -> None:
    launch_one_after_another((latent,), {})
    triton: dict[str, Any] = {
        "embed_tokens": embed_tokens_triton,
        "token_classes": token_classes_triton,
        "engram_hash": engram_hash_triton,
        "engram_lookup": engram_lookup_triton,
    }
    for name, function in triton.items():
        case = next(case for case in CASES if case.name == name)
        for size in (MINI, WIDE) if long_form else (MINI,):
            for batch in BATCHES:
                for dtype in (torch.bfloat16, torch.float32) if long_form else (torch.bfloat16,):
                    given = case.arguments(batch, size, dtype)
                    expected = case.operator.reference(**given)
                    assert isinstance(expected, Tensor)
                    assert same_bits(function(**given), expected), (name, size.name, batch)
                    if name == "engram_hash":
                        check_hash_of_dead_rows(batch, given, expected)
        print(f"{name} agrees", flush=True)
    check_remainders()
    print("remainders agree", flush=True)
    check_every_code()
    print("codes and scales agree", flush=True)
    for size, rows_of_program in ((MINI, 1), (MINI, 4), (WIDE, 2)):
        for batch in BATCHES[:4]:
            check_latents(size, batch, rows_of_program)
    print("latents agree")


def check_hash_of_dead_rows(batch: Batch, given: Arguments, expected: Tensor) -> None:
    """Whatever stands on dead rows: live rows are the same, and dead ones are hashed as nothing but pads."""
    case = next(case for case in CASES if case.operator is kernels.engram_hash)
    for slot in (-99, 5):
        found = engram_hash_triton(**poisoned(case, given, slot))
        assert same_bits(found, expected), (slot, batch)


def check_remainders() -> None:
    """Products that leave int64 wrap around, and remainders of negative numbers are not negative."""
    random = torch.Generator().manual_seed(1)
    batch = Batch((Request(2, 5, 29), Request(0, 0, 3)), dead=1)
    classes = torch.randint(0, 2**20, (batch.rows,), generator=random)
    classes[::7] = DEAD_CLASS
    given: Arguments = {
        "classes": classes,
        "history": torch.randint(0, 2**20, (SLOTS, 2), generator=random),
        "primes": torch.randint(2**33, 2**34, (10,), generator=random),
        "offsets": torch.arange(10) * 2**40,
        "multipliers": torch.randint(2**60, 2**62, (3,), generator=random),
        "write_slots": batch.slots,
        "write_positions": batch.positions,
        "write_starts": batch.starts,
        "pad_class": 3,
    }
    expected = kernels.engram_hash.reference(**given)
    assert (expected % 2**40 < 2**34).all()
    assert same_bits(engram_hash_triton(**given), expected)


def check_every_code() -> None:
    """Each E4M3 code at each scale; the interpreter knows no code of NaN."""
    table = torch.arange(256).repeat(256, 1).to(torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.arange(256).to(torch.uint8).unsqueeze(1).expand(-1, 8).contiguous()
    rows = torch.arange(256).unsqueeze(1)
    expected = kernels.engram_lookup.reference(table, scale, rows, torch.float32)
    found = engram_lookup_triton(table, scale, rows, torch.float32)
    numbers = ~expected.isnan()
    assert same_bits(found[numbers], expected[numbers]) and found[255].isnan().all()


def check_latents(size: Size, batch: Batch, rows_of_program: int) -> None:
    case = next(case for case in CASES if case.operator is kernels.window_latent)
    given = case.make(Draw(batch, size, torch.float32, 0))
    x, frequencies = given["x"], given["frequencies"]
    plain = turn(rms(x, given["weight"], given["epsilon"]), given["positions"], frequencies)
    expected = dequantise_q8(*quantise_q8(plain))
    found = torch.full_like(x, torch.nan)
    rows, channels = x.shape
    latent.make_latents[(-(-rows // rows_of_program),)](
        *(x, given["weight"], given["positions"], frequencies, found, rows, given["epsilon"]),
        channels=channels,
        turning=frequencies.shape[0],
        ROWS=rows_of_program,
        CHANNELS=1 << (channels - 1).bit_length(),
        TURNING=1 << (frequencies.shape[0] - 1).bit_length(),
    )
    moved = found != expected
    assert moved.double().mean() <= CODES_THAT_MOVE or moved.sum() <= 1, (size.name, rows, moved.sum())
    torch.testing.assert_close(found, expected, rtol=2.0**-3, atol=1e-4)


if __name__ == "__main__":
    main(sys.argv[1:] == ["long"])
