"""Prefill and decoding of random models, and what replay costs, in the numerics that the device has by default.

    python -m tests.gpu.measure [--device cpu|cuda]

Prints one line per measurement. Not a test: nothing here passes or fails.
"""

from __future__ import annotations

import sys

import torch

from octavo import Engine, EngineConfig
from octavo.runtime.bench import Load, measure_engine, measure_scheduler
from octavo.runtime.config import GraphMode

CASES: dict[str, list[tuple[str, GraphMode, Load]]] = {
    "cpu": [("tiny", "on", Load(8, 128, 16)), ("tiny", "off", Load(8, 128, 16))],
    "cuda": [
        ("tiny", "on", Load(8, 128, 16)),
        ("tiny", "off", Load(8, 128, 16)),
        ("slice", "on", Load(4, 512, 16)),
        ("slice", "off", Load(4, 512, 16)),
    ],
}


def main(device: str) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}")
    for preset, graphs, load in CASES[device]:
        config = EngineConfig(
            weights="random", preset=preset, device=device, graphs=graphs, chunk=1024, max_requests=16, kv_tokens=16384
        )
        with Engine(config) as engine:
            found = measure_engine(engine, load)
            start = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in engine.timeline)
        print(
            f"{preset} graphs {graphs}, {load.requests} x {load.prompt_tokens} + {load.max_tokens}: "
            f"prefill {found['prefill_tokens_per_second']:.1f} tokens/s, decode "
            f"{found['decode_tokens_per_second']:.2f} tokens/s, each later token "
            f"{found['time_per_output_token']['p50'] * 1e3:.1f} ms; start: {start}",
            flush=True,
        )
    for requests in (1, 64, 256):
        parts = measure_scheduler(requests)["microseconds"]
        print(
            f"scheduler, {requests} requests: " + ", ".join(f"{part} {value:.0f} us" for part, value in parts.items())
        )


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu")
