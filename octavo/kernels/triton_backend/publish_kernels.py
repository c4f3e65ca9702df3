"""Kernels of ``publish``: entries and index keys of some rows from pair to pool, and the halves that wait.

Channels 2 i and 2 i + 1 turn together, and two codes make a byte, so even and odd channels are tensors of their own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.paired_channels import normed, turned_pairs
from octavo.kernels.triton_backend.scales import scale_and_inverse


@triton.jit(do_not_specialize=["rows", "max_pages"])
def publish_rows(
    values,
    gates,
    norm,
    wk,
    k_norm,
    frequencies,
    write_slots,
    write_positions,
    write_starts,
    page_table,
    entries,
    keys,
    pending,
    rows,
    max_pages,
    epsilon,
    channels: tl.constexpr,
    key_channels: tl.constexpr,
    turning: tl.constexpr,
    page_entries: tl.constexpr,
    ratio: tl.constexpr,
    storage: tl.constexpr,
    dtype: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    KEY_PAIRS: tl.constexpr,
    TURNING: tl.constexpr,
):
    """Entries and keys of the rows of a program that complete a group, to their pools.

    Tensors as in the operator, contiguous; ``turning`` pairs of channels turn. storage is "packed", "rounded" (values
    of the codes) or "plain"; entries are rounded to ``dtype`` where the specification has BF16. PAIRS, KEY_PAIRS and
    TURNING pad half the channels and ``turning`` to powers of two.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = tl.load(write_positions + row, mask=row < rows, other=-1)
    completes = (position >= 0) & ((position + 1) % ratio == 0)
    if tl.max(completes.to(tl.int32), axis=0) == 0:
        return
    slot = tl.load(write_slots + row, mask=completes, other=0).to(tl.int64)
    entry = tl.where(completes, position, 0) // ratio

    pair = tl.arange(0, PAIRS)
    known = completes[:, None] & (pair < channels // 2)[None, :]
    at = row.to(tl.int64)[:, None] * channels + 2 * pair[None, :]
    even = tl.load(values + at, mask=known, other=0.0).to(tl.float32)
    odd = tl.load(values + at + 1, mask=known, other=0.0).to(tl.float32)
    if ratio == 2:
        start = tl.load(write_starts + row, mask=completes, other=0)
        here = (position > start)[:, None]
        waiting = pending + slot[:, None] * (2 * channels) + 2 * pair[None, :]
        first = tl.where(here, values + at - channels, waiting)
        first_gate = tl.where(here, gates + at - channels, waiting + channels)
        even = _weighted(even, first, first_gate, gates + at, known)
        odd = _weighted(odd, first + 1, first_gate + 1, gates + at + 1, known)
    even, odd = _normed(even.to(dtype), odd.to(dtype), norm, epsilon, channels, pair)

    key_pair = tl.arange(0, KEY_PAIRS)
    key_even = _product(even, odd, wk, 0, channels, key_channels, pair, key_pair).to(dtype)
    key_odd = _product(even, odd, wk, 1, channels, key_channels, pair, key_pair).to(dtype)
    key_even, key_odd = _normed(key_even, key_odd, k_norm, epsilon, key_channels, key_pair)

    first_token = entry * ratio
    even, odd = turned_pairs(even, odd, first_token, frequencies, channels // 2 - turning, turning, pair, TURNING)
    key_even, key_odd = turned_pairs(
        key_even, key_odd, first_token, frequencies, key_channels // 2 - turning, turning, key_pair, TURNING
    )
    page = tl.load(page_table + slot * max_pages + entry // page_entries, mask=completes, other=0)
    address = page.to(tl.int64) * page_entries + entry % page_entries
    _store(entries, address, completes, even, odd, channels, pair, 16, storage)
    _store(keys, address, completes, key_even, key_odd, key_channels, key_pair, 32, storage)


@triton.jit(do_not_specialize=["rows"])
def keep_waiting(
    values,
    gates,
    write_slots,
    write_positions,
    pending,
    rows,
    channels: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The row of a program to ``pending``, if it is a first half whose request goes no further in this step.

    A launch of its own: what waited before this step is read until the last program of :func:`publish_rows` ends.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(write_positions + row)
    slot = tl.load(write_slots + row)
    more = row + 1 < rows
    next_position = tl.load(write_positions + row + 1, mask=more, other=-1)
    next_slot = tl.load(write_slots + row + 1, mask=more, other=0)
    if (position >= 0) & (position % 2 == 0) & ((next_position < 0) | (next_slot != slot)):
        channel = tl.arange(0, CHANNELS)
        known = channel < channels
        goal = pending + slot.to(tl.int64) * (2 * channels) + channel
        tl.store(goal, tl.load(values + row * channels + channel, mask=known), mask=known)
        tl.store(goal + channels, tl.load(gates + row * channels + channel, mask=known), mask=known)


@triton.jit
def _weighted(second, first, first_gate, second_gate, known):
    """Softmax of the gates of both halves, over their values; all but ``second`` are addresses."""
    first_gate = tl.load(first_gate, mask=known, other=0.0)
    second_gate = tl.load(second_gate, mask=known, other=0.0)
    top = tl.maximum(first_gate, second_gate)
    first_part = tl.exp(first_gate - top)
    second_part = tl.exp(second_gate - top)
    total = first_part + second_part
    first = tl.load(first, mask=known, other=0.0)
    return tl.div_rn(first_part, total) * first + tl.div_rn(second_part, total) * second


@triton.jit
def _normed(even, odd, weight, epsilon, channels: tl.constexpr, pair):
    """``normed`` with weight [channels]."""
    known = pair < channels // 2
    even_weight = tl.load(weight + 2 * pair, mask=known, other=0.0)
    odd_weight = tl.load(weight + 2 * pair + 1, mask=known, other=0.0)
    return normed(even, odd, even_weight, odd_weight, epsilon, channels)


@triton.jit
def _product(even, odd, wk, parity: tl.constexpr, channels: tl.constexpr, key_channels: tl.constexpr, pair, key_pair):
    """Even (parity 0) or odd (1) channels of keys, F32: rows times ``wk`` transposed."""
    known = (pair < channels // 2)[:, None] & (key_pair < key_channels // 2)[None, :]
    at = wk + (2 * key_pair + parity)[None, :] * channels + 2 * pair[:, None]
    products = tl.dot(even, tl.load(at, mask=known, other=0.0).to(even.dtype), input_precision="ieee")
    return tl.dot(odd, tl.load(at + 1, mask=known, other=0.0).to(odd.dtype), products, input_precision="ieee")


@triton.jit
def _store(pool, address, written, even, odd, channels: tl.constexpr, pair, group: tl.constexpr, storage: tl.constexpr):
    """Rows to their addresses of a pool: as Q4nv (groups of 16) or Q4mx (of 32) codes, as values of these, or as is."""
    rows: tl.constexpr = even.shape[0]
    groups: tl.constexpr = even.shape[1] * 2 // group
    known = written[:, None] & (pair < channels // 2)[None, :]
    if storage == "plain":
        at = pool + address[:, None] * channels + 2 * pair[None, :]
        tl.store(at, even, mask=known)
        tl.store(at + 1, odd, mask=known)
    else:
        even = tl.reshape(even.to(tl.float32), (rows, groups, group // 2))
        odd = tl.reshape(odd.to(tl.float32), (rows, groups, group // 2))
        largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=2)
        if group == 16:
            byte, scale = _nearest_e4m3(
                tl.div_rn(tl.maximum(largest, 6.0 * 2.0**-9), tl.full(largest.shape, 6.0, tl.float32))
            )
            even = tl.div_rn(even, tl.broadcast_to(scale[:, :, None], even.shape))
            odd = tl.div_rn(odd, tl.broadcast_to(scale[:, :, None], odd.shape))
        else:
            exponent, inverse = scale_and_inverse(tl.maximum(largest, 6.0 * 2.0**-126) * (1.0 / 6.0))
            byte = exponent >> 23
            scale = exponent.to(tl.float32, bitcast=True)
            even = even * inverse[:, :, None]
            odd = odd * inverse[:, :, None]
        even_code = _e2m1_code(even)
        odd_code = _e2m1_code(odd)
        if storage == "packed":
            width: tl.constexpr = channels // 2 + channels // group
            base = pool + address[:, None] * width
            codes = tl.reshape(even_code | (odd_code << 4), (rows, groups * group // 2))
            tl.store(base + pair[None, :], codes.to(tl.uint8), mask=known)
            number = tl.arange(0, groups)
            held = written[:, None] & (number < channels // group)[None, :]
            tl.store(base + channels // 2 + number[None, :], byte.to(tl.uint8), mask=held)
        else:
            even = tl.reshape(_e2m1_value(even_code) * scale[:, :, None], (rows, groups * group // 2))
            odd = tl.reshape(_e2m1_value(odd_code) * scale[:, :, None], (rows, groups * group // 2))
            at = pool + address[:, None] * channels + 2 * pair[None, :]
            tl.store(at, even.to(pool.dtype.element_ty), mask=known)
            tl.store(at + 1, odd.to(pool.dtype.element_ty), mask=known)


@triton.jit
def _nearest_e4m3(x):
    """(byte, value) of the nearest E4M3 number, ties to the even one, at most 448; x positive F32."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 120 * 8
    whole = x * 512.0 + 8388608.0  # the last bit of this sum is a 512th: the addition rounds
    byte = tl.where(x < 2.0**-6, whole.to(tl.int32, bitcast=True) & 15, normal)
    byte = tl.minimum(byte, 126)
    return byte, tl.where(
        byte < 8, byte.to(tl.float32) * 2.0**-9, ((byte + 120 * 8) << 20).to(tl.float32, bitcast=True)
    )


@triton.jit
def _e2m1_code(x):
    """Round to E2M1, ties to the even code, saturating; the sign in bit 3."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _e2m1_value(code):
    """F32 value of an E2M1 code."""
    bits = code & 7
    above = ((((bits >> 1) + 126) << 23) | ((bits & 1) << 22)).to(tl.float32, bitcast=True)
    magnitude = tl.where(bits < 2, bits.to(tl.float32) * 0.5, above)
    return tl.where(code >= 8, -magnitude, magnitude)
