"""Which official tensors the parameters of a model hold.

A parameter is called like its official tensor. Only routed experts differ: ``layers.3.ffn.experts.w1.weight``
``[E, out, in/2]`` stacks ``layers.3.ffn.experts.{e}.w1.weight`` for a contiguous range of experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from octavo.errors import OctavoError, UsageError

_STACK = re.compile(r"(?P<experts>(?P<kind>layers|mtp)\.\d+\.ffn\.experts)\.(?P<matrix>w[123]\.(weight|scale))")


def official_tensors(
    parameters: Mapping[str, Tensor], *, experts: range | None, draft_experts: range | None
) -> Iterator[tuple[str, Tensor]]:
    """Each official name with the tensor that holds it, stacks unfolded.

    ``experts`` are those resident in ``layers.*``, ``draft_experts`` those in ``mtp.*``; ``None`` numbers a stack from
    0. Raises :class:`OctavoError` if a stack has another size than its range.
    """
    for resident in (experts, draft_experts):
        if resident is not None and (resident.step != 1 or resident.start < 0 or not resident):
            raise UsageError(f"experts {resident}: expected a contiguous, non-empty range such as range(0, 48)")
    for name, parameter in parameters.items():
        parameter = parameter.detach()
        match = _STACK.fullmatch(name)
        if match is None:
            yield name, parameter
            continue
        resident = experts if match["kind"] == "layers" else draft_experts
        if resident is None:
            resident = range(len(parameter))
        if len(parameter) != len(resident):
            raise OctavoError(
                f"{name}: a stack of {len(parameter)} experts for the {len(resident)} experts "
                f"{resident.start} to {resident.stop - 1}"
            )
        for index, expert in enumerate(resident):
            yield f"{match['experts']}.{expert}.{match['matrix']}", parameter[index]
