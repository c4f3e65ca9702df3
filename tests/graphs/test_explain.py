"""What a batch would do: placement, bucket, padding, breaks and bytes, checked against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.testing

from octavo.errors import UsageError
from octavo.graphs.explain import Batch, explain, placement_of
from octavo.runtime.graphs_cli import graphs_app
from tests.graphs.mini_program import prepared

MINI = ("--weights", "random", "--preset", "mini", "--device", "cpu")


def test_one_rank() -> None:
    text = "\n".join(explain(Batch(19, 3), prepared(1), max_requests=8, head_buckets=(1, 2, 4, 8)))
    assert "19 rows of 3 requests on 1 rank" in text and "there is one rank" in text
    assert "19 on every rank" in text and "24 (16 is too small; 11 prepared, up to 64)" in text
    assert "5 of 24 rows, 20.8%" in text
    assert "35 instructions of the body: 18 segments, 17 breaks" in text
    assert "10 x commit_window: backend reference is not capturable on cpu (layers 0-9)" in text
    assert "1 x select_candidates: backend reference is not capturable on cpu (layer 6)" in text
    assert "3 of 8 slots" in text and "collectives   none" in text


def test_sharded() -> None:
    """70 rows on 4 ranks: 18 each, bucket 24, 96 physical rows. Latents of layers without a publisher: 7 gathers."""
    text = "\n".join(explain(Batch(70, 2), prepared(4), max_requests=8, head_buckets=(1, 2, 4, 8)))
    assert "sharded: row g of the step lies on rank g % 4" in text
    assert "18 on every rank (70 / 4, rounded up)" in text and "24 (16 is too small" in text
    assert "26 of 96 rows over 4 ranks, 27.1%" in text
    assert "91 instructions of the body: 44 segments, 30 collectives, 17 breaks" in text
    assert (
        f"7 x gather in global order for attend(latents) and commit_window(latents): {7 * 24 * 384 / 1e3:.3g} KB"
        in text
    )
    assert f"10 x reduce-scatter of the sums over ranks: {10 * 24 * 3072 / 1e3:.0f} KB" in text
    assert "30 in all" in text


def test_replicated() -> None:
    text = "\n".join(explain(Batch(3, 1), prepared(4, sharded=False), max_requests=8, head_buckets=(1, 2, 4, 8)))
    assert "replicated, since 3 rows cannot be dealt to 4 ranks" in text
    assert "3 on every rank" in text and "1 of 4 rows, 25.0%" in text
    assert f"10 x all-reduce of the sums over ranks: {10 * 4 * 1536 / 1e3:.3g} KB" in text


@pytest.mark.parametrize(
    ("rows", "requests", "ranks", "sharded"),
    [(100, 1, 1, False), (3, 1, 4, False), (4, 1, 4, True), (100, 1, 4, True), (9, 9, 4, False), (9, 8, 4, True)],
)
def test_placement(rows: int, requests: int, ranks: int, sharded: bool) -> None:
    assert placement_of(Batch(rows, requests), ranks).sharded is sharded


def test_beyond_the_largest_bucket() -> None:
    text = "\n".join(explain(Batch(65, 1), prepared(1), max_requests=8, head_buckets=(1, 2, 4, 8)))
    assert "none: the largest holds 64 local rows" in text and "not replayed" in text


def test_align() -> None:
    text = "\n".join(explain(Batch(70, 2), prepared(4), max_requests=8, head_buckets=(1, 2, 4, 8), align=16))
    assert "32 on every rank" in text


def test_steps_of_a_long_batch() -> None:
    assert Batch(10_000, 3).steps(4096) == [Batch(4096, 3), Batch(4096, 3), Batch(1808, 3)]
    assert Batch(4097, 3).steps(4096) == [Batch(4096, 3), Batch(1, 1)]
    assert Batch(300, 3).steps(4096) == [Batch(300, 3)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [(Batch(0, 1), "at least one"), (Batch(2, 3), "every request"), (Batch(99, 9), "max-requests")],
)
def test_impossible_batches(batch: Batch, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        explain(batch, prepared(1), max_requests=8, head_buckets=(1, 2, 4, 8))


def run(*arguments: str | Path) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(graphs_app, [str(argument) for argument in arguments])


def test_commands(tmp_path: Path) -> None:
    """All programs of several ranks with one index above them; those of one rank replace them."""
    out = tmp_path / "dump"
    done = run("dump", *MINI, "--layers", "3", "--ranks", "2", "--out", out, "--chunk", "64")
    assert done.exit_code == 0, done.output
    index = (out / "index.md").read_text()
    assert f"{out / 'index.md'}" in done.stdout and "4 of 8 experts on a rank" in index
    several = ["prelude-sharded", "prelude-replicated", "body-sharded", "body-replicated", "epilogue"]
    for name in several:
        assert f"{name}/index.md" in index and (out / name / "pieces.md").exists(), name
    assert "shard" in (out / "prelude-sharded" / "collectives.md").read_text()
    done = run("dump", *MINI, "--layers", "3", "--out", out, "--chunk", "64")
    assert done.exit_code == 0, done.output
    assert "1 rank on cpu" in (out / "body" / "index.md").read_text()
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["body", "epilogue", "prelude"]
    report = json.loads((out / "report.json").read_text())
    assert list(report["programs"]) == ["prelude", "body", "epilogue"] and report["complete"]


def test_explain_command() -> None:
    done = run("explain", *MINI, "--layers", "3", "--rows", "1,70", "--requests", "1", "--ranks", "2", "--chunk", "64")
    assert done.exit_code == 0, done.output
    assert "1 row of 1 request on 2 ranks" in done.stdout and "replicated, since 1 row cannot" in done.stdout
    assert "70 rows take 2 steps of at most 64 rows" in done.stdout and "64 rows of 1 request" in done.stdout


@pytest.mark.parametrize("rows", ["x", "0", "3,", "1,2"])
def test_bad_rows(rows: str) -> None:
    done = run("explain", *MINI, "--rows", rows, "--requests", "2")
    assert isinstance(done.exception, UsageError)


def test_a_bad_directory_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = run("dump", *MINI, "--out", tmp_path / "file")
    assert isinstance(done.exception, UsageError) and "cannot be written" in str(done.exception)
    assert done.stdout == ""
