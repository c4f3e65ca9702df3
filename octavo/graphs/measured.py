"""What a start measured of a program: capturing its buckets, compiling its regions, and what this torch can do.

Apart from the report, whose facts are equal between two starts: seconds and bytes of these are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from octavo.graphs.facts import SCHEMA, Facts
from octavo.graphs.features import features
from octavo.graphs.inductor import CompiledRegions
from octavo.graphs.program import BucketCapture


def capture_facts(capture: BucketCapture) -> Facts:
    """What capturing one bucket took, ready for JSON."""
    return {
        "rows": capture.bucket,
        "segments": capture.segments,
        "seconds": round(capture.seconds, 4),
        "pool_bytes": capture.pool_bytes,
        "graph_bytes": capture.graph_bytes,
    }


def measured_of(captures: Sequence[BucketCapture], regions: CompiledRegions | None) -> Facts:
    """Ready for JSON. ``captures`` is empty without CUDA graphs, ``regions`` None where nothing was compiled."""
    compiled = None
    if regions is not None:
        compiled = {
            "casts_survive": regions.casts_survive,
            "seconds": round(regions.seconds, 4),
            "kinds": [
                {
                    "name": kind.name,
                    "count": kind.count,
                    "seconds": round(kind.seconds, 4),
                    "cached": kind.cached,
                    "text": kind.text,
                }
                for kind in regions.kinds
            ],
        }
    return {
        "schema": SCHEMA,
        "captures": [capture_facts(capture) for capture in captures],
        "regions": compiled,
        "features": [dataclasses.asdict(feature) for feature in features()],
    }
