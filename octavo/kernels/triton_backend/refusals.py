"""Widths that more than one kernel refuses."""

from __future__ import annotations

from octavo.kernels.operator import ModelWidths


def refuse_head_dim(widths: ModelWidths) -> str | None:
    """Of attention and of the entries that it reads, which have a scale for 16 channels."""
    if widths.head_dim % 16 or not 16 <= widths.head_dim <= 512:
        return f"head_dim {widths.head_dim}: allowed are multiples of 16 up to 512"
    return None


def refuse_index_head_dim(widths: ModelWidths) -> str | None:
    """Of the indexer and its keys, which have a scale for 32 channels."""
    if widths.index_head_dim % 32 or not 32 <= widths.index_head_dim <= 128:
        return f"index_head_dim {widths.index_head_dim}: allowed are multiples of 32 up to 128"
    return None
