"""Data files that travel with the package: configs and tokenizers of the presets, and octavo-nano."""

from __future__ import annotations

import gzip
from pathlib import Path

NANO = "octavo-nano"
"""The name of the model that comes with Octavo."""
_DATA = Path(__file__).parent / "data"


def nano_path() -> Path:
    """The checkpoint of octavo-nano, in the official layout: a small model trained for this project."""
    return _DATA / "nano"


def packaged_file(preset: str, name: str) -> bytes:
    """``config.json``, ``tokenizer.json`` or ``tokenizer_config.json`` of a preset; all but mini have the real ones."""
    folder = _DATA / "mini" if preset == "mini" else _DATA
    plain, packed = folder / name, folder / f"{name}.gz"
    return plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
