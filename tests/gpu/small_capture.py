"""A small capture and a few replays, to be run under a memory checker: ``python -m tests.gpu.small_capture``."""

from __future__ import annotations

from octavo import Engine, EngineConfig, SamplingParams
from tests.model.mini_run import MINI


def main() -> None:
    config = EngineConfig(
        model=MINI,
        device="cuda",
        numerics="fast",
        compile="none",
        chunk=8,
        buckets="1,8",
        kv_tokens=256,
        max_requests=2,
    )
    with Engine(config) as engine:
        engine.generate([[300, 301, 302, 303, 304], [7] * 11], SamplingParams(max_tokens=3, ignore_eos=True))
        stats = engine.stats()
    assert stats["replays"] and not stats["not_replayed"], stats
    print(f"replayed {sum(stats['replays'].values())} steps")


if __name__ == "__main__":
    main()
