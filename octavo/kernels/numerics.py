"""Row-invariant arithmetic: the rules of design section 8, each as one function.

A row's bits must not depend on how many rows share the call, where the row stands, or how many threads run. Then
chunked, batched, sharded and replayed runs agree to the bit, and any difference is a bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

BLOCK_ROWS = 16
"""F32 products run on blocks of exactly this many rows: other heights may take another CPU kernel."""


def exact_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in F64, shapes [..., R, K] and [..., N, K] -> [..., R, N] F64.

    Products of quantised or BF16 values have so few bits that their F64 sums are exact: order cannot matter.
    """
    return torch.matmul(x.double(), weight.double().transpose(-1, -2))


def blocked_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in F32, [R, K] F32 and [N, K] F32 -> [R, N] F32, for products that the model does in F32.

    On the CPU one thread computes it: a BLAS may cut the sum over K differently for every number of threads.
    """
    rows = x.shape[0]
    blocks = -(-rows // BLOCK_ROWS)
    padded = torch.nn.functional.pad(x.contiguous(), (0, 0, 0, blocks * BLOCK_ROWS - rows))
    transposed = weight.t()
    with nullcontext() if x.is_cuda else _one_thread():
        products = [torch.mm(block, transposed) for block in padded.split(BLOCK_ROWS)]
    return torch.cat(products)[:rows] if rows else x.new_empty(0, weight.shape[0])


@contextmanager
def _one_thread() -> Iterator[None]:
    """One CPU thread for this thread's calls of torch.

    Torch keeps the number per calling thread; only a thread that meets torch for the first time just now starts with
    it too, which costs speed and changes no bit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def mean_of_squares(x: Tensor) -> Tensor:
    """Mean of squares over the last axis, kept; F32. The operand is made contiguous: strided sums differ."""
    return x.float().contiguous().square().mean(-1, keepdim=True)


def sigmoid(x: Tensor) -> Tensor:
    """Composed: torch's own sigmoid differs between the vector body and the tail of a tensor."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), and x itself beyond 20 as in torch's definition."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


def sum_in_order(terms: list[Tensor]) -> Tensor:
    """Left to right; a library sum over a short axis may choose its own order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest of the last axis, ties to the lower index, best first: [..., count] int64.

    A stable sort, never ``topk``: appending masked columns changes how ``topk`` breaks ties.
    """
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
