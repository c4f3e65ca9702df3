"""What a run leaves behind: the checkpoint in official formats, the F32 masters, and the state to go on from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.quantise import quantise_q8
from octavo.model.checkpoint import Checkpoint
from octavo.model.config import ModelConfig
from octavo.model.layout import expected_tensors
from octavo.model.parameters import official_tensors
from octavo.model.writing import write_shards
from tools.train_nano.formats import Format, encode_f4_rows, encode_tiles
from tools.train_nano.loop import Progress
from tools.train_nano.masters import Masters, stored_format
from tools.train_nano.optimiser import Optimiser

_TENSORS_FILE = "model-00001-of-00001.safetensors"


def encoded(masters: Masters) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by official name, on the CPU, in the parameter types of the engine."""
    found: dict[str, Tensor] = {}
    for name, master in masters.named().items():
        value = master.detach().cpu()
        scale_name = name.removesuffix("weight") + "scale"
        match stored_format(name):
            case Format.TILES:
                found[name], found[scale_name] = encode_tiles(value)
            case Format.F4_ROWS:
                found[name], found[scale_name] = encode_f4_rows(value)
            case Format.F8_ROWS:
                found[name], found[scale_name] = quantise_q8(value)
            case Format.BF16:
                found[name] = value.to(torch.bfloat16)
            case _:
                found[name] = value
    return dict(official_tensors(found, experts=None, draft_experts=None))


def write_checkpoint(masters: Masters, path: Path, tokenizer_files: Path) -> None:
    """Config, tokenizer, tensors and index; checked as the engine checks a checkpoint before it loads one."""
    path.mkdir(parents=True, exist_ok=True)
    write_shards(path, [(_TENSORS_FILE, encoded(masters))], expected_tensors(masters.config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tokenizer_files / name).read_bytes())
    config = json.dumps(masters.config.to_dict(), indent=2) + "\n"
    (path / "config.json").write_text(config, encoding="utf-8")
    Checkpoint(path).check()


def save_masters(masters: Masters, path: Path) -> None:
    torch.save({name: master.detach().cpu() for name, master in masters.named().items()}, path)


def save_state(path: Path, masters: Masters, optimiser: Optimiser, progress: Progress) -> None:
    """Everything to go on from, to the bit."""
    state = {
        "config": masters.config.to_dict(),
        "masters": {name: master.detach() for name, master in masters.named().items()},
        "optimiser": optimiser.state(),
        "progress": dataclasses.asdict(progress),
    }
    torch.save(state, path)


@torch.no_grad()
def load_state(path: Path, masters: Masters, optimiser: Optimiser) -> Progress:
    """Fill masters and optimiser from a state of the same config."""
    device = next(masters.parameters()).device
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    assert ModelConfig.from_dict(state["config"]) == masters.config
    for name, master in masters.named().items():
        master.copy_(state["masters"][name])
    optimiser.load(state["optimiser"])
    return Progress(**state["progress"])
