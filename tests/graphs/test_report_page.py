"""``report.html``: one page with all facts in it, that asks nobody for anything."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.graphs.compile import compilation_of
from octavo.graphs.dump import PAGE, REPLAY_LOG, DumpWriter, claim, write_overview, write_page
from octavo.graphs.explain import Prepared
from octavo.graphs.facts import Facts
from octavo.graphs.report_page import LAST_STEPS, report_page, script_json
from octavo.kernels.choice import choose_backends
from octavo.model.model import empty_model
from octavo.model.presets import preset
from octavo.passes.base import PassContext
from octavo.passes.runner import run_passes
from octavo.runtime.config import EngineConfig
from octavo.runtime.engine import Engine
from octavo.runtime.parts import body_inputs, classify
from octavo.runtime.pools import Pools, PoolSizes, Storage
from octavo.runtime.sampling import SamplingParams
from tests.graphs.mini_program import fabricated, write_dump

VOID = {"meta", "link", "br", "input", "hr", "img"}
MOST_BYTES = 3_000_000


class Page(HTMLParser):
    """Checks that elements are closed in their order; collects attributes and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "elements that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)

    @property
    def island(self) -> Any:
        return json.loads(self.scripts[0])


def check_self_contained(text: str) -> Page:
    page = Page(text)
    assert len(page.scripts) == 2, "the facts and one script"
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 10
    assert not [each for each in page.attributes if each[1] in ("src", "srcset", "data", "action", "background")]
    links = [value for _, name, value in page.attributes if name == "href"]
    assert links and all(link.startswith(("#", "data:,")) for link in links)
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids), "links lead somewhere"
    own = text.replace("http://www.w3.org/2000/svg", "")  # the name of a namespace, never fetched
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|\burl\((?!#)|\bimport\b|\bfetch\b|XMLHttpRequest", own)
    assert "{{" not in re.sub(r"\$\{\{", "", own), "a part of the template was not filled in"
    return page


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Facts]]:
    directory = tmp_path_factory.mktemp("page") / "dump"
    claim(directory)
    programs = {
        "body": write_dump(directory / "body", 1)[0],
        "epilogue": write_dump(directory / "epilogue", 4, numerics="fast", measure=fabricated)[0],
    }
    write_overview(directory, ["mini <model>"], programs)
    return directory, programs


def test_the_page_holds_the_facts(dump: tuple[Path, dict[str, Facts]]) -> None:
    """Reports without aliases (storages tell them), seconds, and what each pass did."""
    directory, programs = dump
    text = (directory / PAGE).read_text(encoding="utf-8")
    island = check_self_contained(text).island
    assert "<title>mini &lt;model&gt;</title>" in text and island["title"] == ["mini <model>"]
    assert list(island["programs"]) == ["body", "epilogue"]
    for name, report in programs.items():
        shown = island["programs"][name]
        storages = {storage["storage"]: storage["buffers"] for storage in shown["storages"]}
        for buffer in shown["buffers"]:
            buffer["aliases"] = [other for other in storages[buffer["storage"]] if other != buffer["name"]]
        assert shown == json.loads(json.dumps(report))
        assert island["timings"][name] == json.loads((directory / name / "timings.json").read_text())
        differences = {entry["name"]: entry["diff"] for entry in report["passes"] if entry["diff"]}
        assert len(differences) == 11 and island["differences"][name].keys() == differences.keys()
        for each, file in differences.items():
            assert island["differences"][name][each] == (directory / name / file).read_text()
    assert island["replays"] == []


def test_calls_of_kinds(dump: tuple[Path, dict[str, Facts]]) -> None:
    """Operators in order, and nodes between them, are those of a kind; each lies in a layer of its piece."""
    _, programs = dump
    for report in programs.values():
        first = {piece["number"]: piece for piece in report["pieces"]}
        between, counts = set(), Counter[str]()
        for kind in report["kinds"]:
            nodes = [call.get("operator") or call["node"] for call in kind["calls"]]
            assert len(nodes) == kind["nodes"] and {n: nodes.count(n) for n in nodes} == kind["operators"]
            between |= {call["node"] for call in kind["calls"] if "node" in call}
            for call in kind["calls"]:
                if "region" in call:
                    counts[call["region"]] += kind["count"]
            places = [call["layer"] for call in kind["calls"]]
            assert places == sorted(places) and places[-1] == max(0, len(first[kind["pieces"][0]]["layers"]) - 1)
        assert between == {"unsqueeze", "repeat", "mul", "unflatten"}
        assert counts == {region["of"]: region["count"] for region in report["regions"]}
    assert not programs["body"]["regions"] and len(programs["epilogue"]["regions"]) > 10


def test_what_a_start_measured(dump: tuple[Path, dict[str, Facts]]) -> None:
    """It is in the page for the program that was started, and nothing for the other."""
    directory, programs = dump
    measured = Page((directory / PAGE).read_text(encoding="utf-8")).island["measured"]
    assert measured == {"body": None, "epilogue": json.loads((directory / "epilogue" / "measured.json").read_text())}
    kinds = {kind["text"]: kind["count"] for kind in measured["epilogue"]["regions"]["kinds"]}
    assert kinds == {region["text"]: region["count"] for region in programs["epilogue"]["regions"]}
    rows = [bucket["rows"] for bucket in programs["epilogue"]["buckets"]]
    assert [capture["rows"] for capture in measured["epilogue"]["captures"]] == rows[::-1]


def test_script_json_cannot_end_its_element() -> None:
    bad = ["</script><script>alert(1)", "<!--", "</SCRIPT >"]
    assert "<" not in script_json(bad) and json.loads(script_json(bad)) == bad
    page = check_self_contained(report_page(bad, {}, {}))
    assert page.island["title"] == bad


def test_history(dump: tuple[Path, dict[str, Facts]], tmp_path: Path) -> None:
    """The last steps of the log, oldest first; a later page replaces the earlier one."""
    steps = [
        {"step": n, "rows": 1, "bucket": 1, "microseconds": 5, "not_replayed": None} for n in range(LAST_STEPS + 9)
    ]
    directory, programs = dump
    assert Page(report_page([], programs, {}, steps)).island["replays"] == steps[9:]
    log = directory / REPLAY_LOG
    log.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    write_page(directory)
    assert Page((directory / PAGE).read_text(encoding="utf-8")).island["replays"] == steps[9:]
    log.unlink()
    write_page(directory)


def test_an_engine_shows_its_steps(tmp_path: Path) -> None:
    settings = EngineConfig(
        preset="mini", weights="random", layers=2, kv_tokens=256, chunk=16, buckets="1,8", dump_dir=tmp_path / "dump"
    )
    with Engine(settings) as engine:
        before = Page((tmp_path / "dump" / PAGE).read_text(encoding="utf-8")).island
        engine.generate([[1] * 20], SamplingParams(max_tokens=3, temperature=0.0))
    after = Page((tmp_path / "dump" / PAGE).read_text(encoding="utf-8")).island
    logged = [json.loads(line) for line in (tmp_path / "dump" / REPLAY_LOG).read_text().splitlines()]
    assert before["replays"] == [] and after["replays"] == logged and len(logged) == 4
    assert [step["rows"] for step in logged] == [16, 4, 1, 1]
    assert logged[0]["not_replayed"] == "beyond the largest bucket" and logged[1]["bucket"] == 8
    assert {key: value for key, value in after.items() if key != "replays"} == {
        key: value for key, value in before.items() if key != "replays"
    }
    claim(tmp_path / "dump")
    assert not (tmp_path / "dump" / PAGE).exists(), "an older page goes with its dump"


def test_forty_layers(tmp_path: Path) -> None:
    """The released model's body for eight ranks, with all that a start measures: as large as reports get."""
    config, device, ranks = preset("released"), torch.device("cpu"), 8
    text = config.text_config
    with FakeTensorMode():
        model = empty_model(config, device, range(text.n_routed_experts // ranks))
        pools = Pools(text, PoolSizes(slots=3, pages=5, max_pages=4), Storage.BF16, device)
        compilation = compilation_of(model.body, body_inputs(text, pools, torch.bfloat16), classify)
    claim(tmp_path)
    writer = DumpWriter(tmp_path / "body-sharded")
    writer.captured(compilation)
    context = PassContext(ranks=ranks, sharded=True, backends=choose_backends("fast", "cpu"))
    results = run_passes(compilation, context, after=writer.after)
    buckets = (1, 8, 64)
    measured = fabricated(Prepared(compilation, context, buckets))
    report = writer.finish(compilation, context, buckets, results, measured=measured)
    write_overview(tmp_path, ["released"], {"body-sharded": report})
    file = tmp_path / PAGE
    assert 400_000 < file.stat().st_size < MOST_BYTES, "a third of it for each of the other programs is room enough"
    shown = check_self_contained(file.read_text(encoding="utf-8")).island["programs"]["body-sharded"]
    assert {layer for piece in shown["pieces"] for layer in piece["layers"]} == set(range(40))
    assert len(shown["pieces"]) == len(report["pieces"]) > 200
