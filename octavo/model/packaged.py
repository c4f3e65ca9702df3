"""Data files that travel with the package: configs and tokenizers of the presets."""

from __future__ import annotations

import gzip
from importlib import resources


def packaged_file(preset: str, name: str) -> bytes:
    """``config.json``, ``tokenizer.json`` or ``tokenizer_config.json`` of a preset; all but mini have the real ones."""
    data = resources.files("octavo.model").joinpath("data")
    folder = data.joinpath("mini") if preset == "mini" else data
    plain, packed = folder.joinpath(name), folder.joinpath(f"{name}.gz")
    return plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
