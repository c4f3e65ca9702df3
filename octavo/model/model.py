"""The whole text model: prelude, body, epilogue, and the names that the checkpoint knows its parameters by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.model.body import Body
from octavo.model.config import ModelConfig
from octavo.model.prelude import Embedding
from octavo.model.weights import HeldInBF16, LinearF32


class Model(nn.Module):
    """Embedding, body and head on one device. Engram tables live beside it (``octavo.model.prelude``).

    The head is the epilogue: it takes the hidden rows that sample.

    ``experts`` is the range of routed experts to hold, all of them by default; the router always knows all.
    Parameters are uninitialised: load or randomise them.
    """

    def __init__(self, config: ModelConfig, experts: range | None = None) -> None:
        super().__init__()
        text = config.text_config
        self.config = config
        self.experts = experts if experts is not None else range(text.n_routed_experts)
        self.embed = Embedding(text)
        self.body = Body(config, self.experts)
        self.head = LinearF32(text.vocab_size, text.hidden_size)

    def official_parameters(self) -> dict[str, Tensor]:
        """Parameters by official tensor name; expert stacks carry the name without the expert number."""
        return {name.removeprefix("body."): tensor for name, tensor in self.named_parameters()}

    def fill_bf16(self) -> None:
        """Make the BF16 forms of F8 weights, if there is room for them; the weights are there."""
        for module in _held_in_bf16(self):
            module.fill_bf16()


def resident_bytes(model: Model) -> int:
    """Bytes of all weights, also of a model on the meta device."""
    return sum(parameter.nbytes for parameter in model.parameters()) + bf16_bytes(model)


def bf16_bytes(model: Model) -> int:
    """Of these, F8 weights that are held in BF16 too."""
    held = [module.weight_bf16 for module in _held_in_bf16(model)]
    return sum(weight.nbytes for weight in held if weight is not None)


def empty_model(
    config: ModelConfig, device: torch.device, experts: range | None = None, bf16_weights: bool = False
) -> Model:
    """A model with uninitialised parameters on ``device``, and room for F8 ones in BF16 too if asked for."""
    with torch.device(device):
        model = Model(config, experts)
        if bf16_weights:
            for module in _held_in_bf16(model):
                module.hold_bf16()
    return model


def _held_in_bf16(model: Model) -> list[HeldInBF16]:
    return [module for module in model.modules() if isinstance(module, HeldInBF16)]
