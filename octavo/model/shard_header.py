"""The header of a safetensors file: which tensors it holds and where, checked before any byte is used.

A file is an 8-byte little-endian header length, the header (JSON: name -> dtype, shape, data_offsets) and the data.
Offsets count from the start of the data; tensors fill it without gap or overlap.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.model.layout import DTYPE_BYTES, TensorSpec

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""
DAMAGED = "Download or copy the file again."


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's bytes are: ``[start, stop)``, counted from the beginning of the file."""

    spec: TensorSpec
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Span]:
    """The tensors of ``path`` in the order of their bytes.

    Raises :class:`OctavoError`, naming the file and the tensor, if the file is foreign, truncated, or if sizes or
    offsets contradict each other.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(_LENGTH_BYTES), size)
            text = file.read(length)
    except OSError as error:
        raise OctavoError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        header = json.loads(text)
    except ValueError as error:
        raise OctavoError(f"{path}: not a safetensors file (the header is not JSON: {error})") from error
    if not isinstance(header, dict):
        raise OctavoError(f"{path}: not a safetensors file (the header is not a JSON object)")
    header.pop("__metadata__", None)
    begin = _LENGTH_BYTES + length
    spans = {name: _span(path, name, entry, begin) for name, entry in header.items()}
    spans = dict(sorted(spans.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_cover(path, spans, begin, size)
    return spans


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if size < _LENGTH_BYTES:
        raise OctavoError(f"{path}: {size} bytes are too few for a safetensors file: truncated. {DAMAGED}")
    length = int.from_bytes(prefix, "little")
    if length > _MAX_HEADER_BYTES:
        raise OctavoError(f"{path}: not a safetensors file (it would have a header of {length} bytes)")
    if length > size - _LENGTH_BYTES:
        raise OctavoError(
            f"{path}: the header of {length} bytes reaches beyond the file of {size} bytes: truncated, or not a "
            f"safetensors file. {DAMAGED}"
        )
    return length


def _span(path: Path, name: str, entry: Any, begin: int) -> Span:
    """One header entry, checked by itself."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise OctavoError(f"{path}: {name}: expected dtype, shape and data_offsets, found {entry!r}. {DAMAGED}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise OctavoError(f"{path}: {name}: unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape):
        raise OctavoError(f"{path}: {name}: {shape!r} is no shape. {DAMAGED}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise OctavoError(f"{path}: {name}: {offsets!r} are no data_offsets. {DAMAGED}")
    spec, (start, stop) = TensorSpec(tuple(shape), dtype), offsets
    if stop - start != spec.nbytes:
        raise OctavoError(
            f"{path}: {name}: data_offsets {offsets} span {stop - start} bytes, but {spec} has {spec.nbytes}. {DAMAGED}"
        )
    return Span(spec, begin + start, begin + stop)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_cover(path: Path, spans: dict[str, Span], begin: int, size: int) -> None:
    """The tensors, in order, fill the data exactly."""
    end, previous = begin, "the header"
    for name, span in spans.items():
        if span.stop > size:
            raise OctavoError(
                f"{path}: {name}: its bytes end at {span.stop}, the file at {size}: truncated, or its data_offsets "
                f"are out of range. {DAMAGED}"
            )
        if span.start != end:
            relation = "overlap" if span.start < end else f"leave {span.start - end} unused bytes after"
            raise OctavoError(f"{path}: {name}: its bytes {relation} those of {previous}. {DAMAGED}")
        end, previous = span.stop, name
    if end != size:
        raise OctavoError(f"{path}: {size - end} bytes follow those of {previous}, the last tensor. {DAMAGED}")
