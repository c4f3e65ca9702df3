"""From a config to a model that can run: device, memory check, weights, Engram tables, tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from octavo.errors import OctavoError, UsageError
from octavo.kernels.choice import Numerics, choose_backends, describe_backends
from octavo.kernels.operator import OPERATORS
from octavo.model.checkpoint import Checkpoint
from octavo.model.config import ModelConfig, TextConfig
from octavo.model.loading import load_parameters
from octavo.model.memory import check_memory
from octavo.model.model import Model, bf16_bytes, empty_model, resident_bytes
from octavo.model.prelude import Prelude
from octavo.model.random_weights import randomise
from octavo.model.token_classes import pad_class, token_map
from octavo.runtime.capacity import Capacity, plan_capacity, step_bytes
from octavo.runtime.config import EngineConfig
from octavo.runtime.engram_memory import EngramMemory, choose_engram_memory, load_tables, table_bytes
from octavo.runtime.model_source import checkpoint_path, model_config_of, model_name, tokenizer_of
from octavo.runtime.pools import Storage
from octavo.runtime.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""``progress(phase, done, total)`` of a start: bytes of weights, then programs."""

SLICE_EXPERTS = 48
"""Resident experts of the slice preset: an eighth of the released model's."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything that a runner needs, on one device."""

    model: Model
    prelude: Prelude
    tokenizer: Tokenizer
    capacity: Capacity
    device: torch.device
    numerics: Numerics
    backends: dict[str, str]
    """Backend of every operator."""
    inductor: bool
    """Whether regions are compiled."""
    chunk: int
    """Most rows of a step, on all ranks together."""
    replicated_experts: bool
    """Every rank holds all experts."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: BF16, or F32 in mode ``plain``."""
        return activation_dtype(self.numerics)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def describe(self, config: EngineConfig) -> str:
        """Two lines for the start: what is loaded where, and what fits."""
        text = self.config.text_config
        source = model_name(config)
        return (
            f"{source}: {text.num_hidden_layers} layers, {len(self.model.experts)} of {text.n_routed_experts} experts "
            f"on {self.device}, {self.numerics} numerics ({describe_backends(self.backends.values())})\n"
            f"{self.capacity.describe()}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine would hold, known before anything is loaded."""

    checkpoint: Checkpoint | None
    config: ModelConfig
    experts: range
    device: torch.device
    numerics: Numerics
    weight_bytes: int
    """On the device, Engram tables included where they lie there."""
    bf16_bytes: int
    """Of these, F8 weights that are held in BF16 too."""
    engram: EngramMemory
    """Where the Engram tables lie."""
    table_bytes: int
    """Of the Engram tables."""
    capacity: Capacity
    step_bytes: int
    """Estimated, for the most rows that the rank computes in a step."""

    @property
    def needed_bytes(self) -> int:
        """On the device: weights, state and a step."""
        return self.weight_bytes + self.capacity.bytes + self.step_bytes

    @property
    def shared_bytes(self) -> int:
        """Of host memory, once for all ranks of a host: copied Engram tables. Mapped ones can be dropped."""
        return self.table_bytes if self.engram == "host" else 0


def plan(config: EngineConfig, rank: int = 0) -> Plan:
    """Read configs and count the bytes of a rank.

    Raises :class:`UsageError` or :class:`OctavoError` for what cannot be.
    """
    device = choose_device(config.device, local_rank(rank) if config.ranks > 1 else None)
    path = checkpoint_path(config)
    checkpoint = Checkpoint(path) if path is not None else None
    model_config = model_config_of(config)
    text = model_config.text_config
    experts = _resident_experts(config, text)
    if config.expert_placement == "sharded":
        experts = _share(experts, rank, config.ranks)
    numerics = choose_numerics(config.numerics, device)
    bf16 = choose_bf16_weights(config.bf16_weights, numerics, device)
    model = empty_model(model_config, torch.device("meta"), experts, bf16)
    weight_bytes = resident_bytes(model)
    engram, tables = choose_engram_memory(config, device), table_bytes(text)
    if engram == "device":
        weight_bytes += tables
    storage = Storage.F32 if numerics == "plain" else Storage(config.kv_storage)
    step = step_bytes(text, most_rows(config))
    shared = tables if engram == "host" and device.type == "cpu" else 0
    capacity = plan_capacity(config, text, storage, device, weight_bytes + shared, step)
    return Plan(
        checkpoint,
        model_config,
        experts,
        device,
        numerics,
        weight_bytes,
        bf16_bytes(model),
        engram,
        tables,
        capacity,
        step,
    )


def assemble(config: EngineConfig, progress: Progress | None = None, rank: int = 0) -> Assembly:
    """Load or make the weights of a rank, and tell ``progress`` of it.

    Raises :class:`UsageError` or :class:`OctavoError`, before anything is loaded where the reason is known by then.
    """
    planned = plan(config, rank)
    if planned.device.type == "cuda":
        # Parts of a sum over K would be added in BF16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    inductor = choose_compiler(config.compile, planned.numerics, planned.device)
    checkpoint, model_config, experts, device = planned.checkpoint, planned.config, planned.experts, planned.device
    check_planned(planned.needed_bytes, planned)
    tokenizer = tokenizer_of(config, model_config)
    classes = token_map(tokenizer.backend, model_config.text_config)
    bf16 = choose_bf16_weights(config.bf16_weights, planned.numerics, device)
    model = empty_model(model_config, device, experts, bf16)
    loaded = functools.partial(progress, "weights") if progress is not None else None
    if checkpoint is not None:
        if config.layers is None and config.experts is None:
            checkpoint.check()
        load_parameters(model.official_parameters(), checkpoint, experts=experts, progress=loaded)
    else:
        randomise(model.official_parameters(), config.weights_seed, experts=experts, progress=loaded)
    model.fill_bf16()
    copied = functools.partial(progress, "Engram tables") if progress is not None else None
    tables = load_tables(config, checkpoint, model_config.text_config, device, copied)
    ids = torch.from_numpy(classes).to(device)
    dtype = activation_dtype(planned.numerics)
    prelude = Prelude(model.embed, tables, ids, pad_class(classes, model_config.text_config), dtype)
    backends = choose_backends(planned.numerics, str(device), model_config.text_config)
    check_weights(model, backends)
    return Assembly(
        model,
        prelude,
        tokenizer,
        planned.capacity,
        device,
        planned.numerics,
        backends,
        inductor,
        config.chunk,
        config.expert_placement == "replicated",
    )


def check_weights(model: Model, backends: dict[str, str]) -> None:
    """Raise :class:`OctavoError` if the backend of an operator cannot compute with the loaded weights."""
    weights = model.official_parameters()
    for operator, backend in backends.items():
        reason = OPERATORS[operator].backends[backend].refuses_weights(weights)
        if reason is not None:
            raise OctavoError(f"{operator}, backend {backend}: {reason}. Use --numerics reference for these weights.")


def check_planned(needed_bytes: int, planned: Plan) -> None:
    """Raise :class:`OctavoError` unless ``needed_bytes`` fit on the device, and the tables that are copied to the host
    beside them."""
    host = torch.device("cpu")
    if planned.device == host:
        needed_bytes += planned.shared_bytes
    try:
        check_memory(needed_bytes, planned.device)
        check_memory(planned.shared_bytes, host)
    except OctavoError as error:
        text = str(error)
        if planned.bf16_bytes:
            text += f" --bf16-weights off takes {planned.bf16_bytes / 2**30:.2f} GiB less on the device."
        if planned.shared_bytes:
            text += (
                f" Copied Engram tables take {planned.shared_bytes / 2**30:.2f} GiB of the host (--engram host); "
                "--engram mmap takes none."
            )
        raise OctavoError(text) from error


def local_rank(rank: int) -> int:
    """The number of a rank on its host: what torchrun says, and the rank itself of those that Octavo starts."""
    return dist.get_node_local_rank(rank) if dist.is_torchelastic_launched() else rank


def choose_device(name: str, rank: int | None = None) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` -> a device that is there; each of several ranks has its own GPU."""
    if rank is not None and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        name = f"cuda:{rank}"
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OctavoError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices. Use --device cpu, or see "
            "what `octavo doctor` says."
        )
    return device


def choose_numerics(name: Literal["auto"] | Numerics, device: torch.device) -> Numerics:
    """What ``auto`` means on this device; other names are what they say."""
    if name != "auto":
        return name
    return "fast" if device.type == "cuda" else "reference"


def choose_compiler(name: Literal["auto", "inductor", "none"], numerics: Numerics, device: torch.device) -> bool:
    """Whether regions are compiled with Inductor. Raises :class:`UsageError` where that would change results."""
    if name == "inductor" and numerics != "fast":
        raise UsageError(
            f"--compile inductor with {numerics} numerics: Inductor's exp, log1p and mean differ from PyTorch's, and "
            "these numerics are defined to the bit. Use --numerics fast, or --compile none."
        )
    return name == "inductor" or (name == "auto" and numerics == "fast" and device.type == "cuda")


def choose_overlap(config: EngineConfig, device: torch.device) -> bool:
    """Whether a step is launched before the one before is read. Without a GPU the host computes the step itself."""
    return config.overlap == "on" or (config.overlap == "auto" and config.ranks == 1 and device.type == "cuda")


def choose_bf16_weights(name: Literal["auto", "on", "off"], numerics: Numerics, device: torch.device) -> bool:
    """Whether F8 weights are held in BF16 too. Raises :class:`UsageError` where nothing would read them."""
    if name == "on" and numerics != "fast":
        raise UsageError(
            f"--bf16-weights on with {numerics} numerics, which multiply in wider types: nothing would read them. Use "
            "--numerics fast, or leave the option out."
        )
    return name == "on" or (name == "auto" and numerics == "fast" and device.type == "cuda")


def activation_dtype(numerics: Numerics) -> torch.dtype:
    """BF16, or F32 in mode ``plain``."""
    return torch.float32 if numerics == "plain" else torch.bfloat16


def _resident_experts(config: EngineConfig, text: TextConfig) -> range:
    count = config.experts
    if count is None:
        count = min(SLICE_EXPERTS, text.n_routed_experts) if config.preset == "slice" else text.n_routed_experts
    if count > text.n_routed_experts:
        raise UsageError(f"--experts {count}: the model has {text.n_routed_experts}")
    return range(count)


def _share(experts: range, rank: int, ranks: int) -> range:
    """The experts of one rank."""
    if len(experts) % ranks:
        fitting = [count for count in range(1, len(experts) + 1) if not len(experts) % count]
        raise UsageError(
            f"--ranks {ranks}: {len(experts)} experts cannot be dealt evenly; {', '.join(map(str, fitting))} ranks can"
        )
    count = len(experts) // ranks
    return experts[rank * count : (rank + 1) * count]


def most_rows(config: EngineConfig) -> int:
    """That a rank computes in a step: its share of a chunk, or all rows of a step that every rank computes whole."""
    if config.ranks == 1:
        return config.chunk
    whole = max(config.max_requests, config.ranks - 1)
    return max(-(-config.chunk // config.ranks), min(whole, config.chunk))
