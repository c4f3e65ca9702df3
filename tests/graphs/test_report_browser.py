"""The page of a dump in a real browser: it draws, searches, obeys the keyboard, and no error is heard of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.graphs.dump import PAGE, claim, write_overview
from octavo.graphs.facts import Facts
from tests.browser import Browser, count, needs_browser, texts, words
from tests.graphs.mini_program import fabricated, write_dump

pytestmark = needs_browser
STEPS = [
    {"step": 1, "rows": 60, "bucket": 64, "microseconds": 9000, "not_replayed": None},
    {"step": 2, "rows": 3, "bucket": 4, "microseconds": 2000, "not_replayed": None},
    {"step": 3, "rows": 99, "bucket": None, "microseconds": 70000, "not_replayed": "beyond the largest bucket"},
]


Dump = tuple[Path, dict[str, Facts]]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A page of two programs, of four ranks and of one that was started, with three steps."""
    directory = tmp_path_factory.mktemp("page") / "dump"
    claim(directory)
    programs = {
        "body-sharded": write_dump(directory / "body-sharded", 4)[0],
        "epilogue": write_dump(directory / "epilogue", 1, numerics="fast", measure=fabricated)[0],
    }
    (directory / "replay.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in STEPS))
    write_overview(directory, ["mini"], programs)
    return directory / PAGE, programs


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def page(browser: Browser, dump: Dump) -> Iterator[Browser]:
    """The page, newly opened; afterwards nothing may have been heard of it, and it may have loaded itself alone."""
    browser.heard.clear()
    browser.requests.clear()
    browser.call("Page.navigate", url="about:blank")
    browser.open(dump[0].as_uri())
    yield browser
    assert browser.heard == []
    assert {request.split("#")[0] for request in browser.requests} <= {dump[0].as_uri(), "about:blank"}


def bright(browser: Browser) -> set[int]:
    """Instructions that the picture does not dim."""
    expression = "[...document.querySelectorAll('#layers .item:not(.dim)')].map((n) => Number(n.dataset.piece))"
    return set(browser.ask(expression))


def test_everything_is_drawn(page: Browser, dump: Dump) -> None:
    report = dump[1]["body-sharded"]
    drawn = page.ask("[...document.querySelectorAll('#layers .item')].map((n) => Number(n.dataset.piece))")
    assert set(drawn) == {piece["number"] for piece in report["pieces"]}
    layers = page.ask("[...document.querySelectorAll('#layers .row')].map((n) => n.dataset.layer)")
    assert layers == [str(layer) for layer in range(10)]
    assert count(page, "#lifelines [data-buffer]") == len(report["buffers"])
    assert count(page, "#bucket-chart .column") == len(report["buckets"])
    assert count(page, "#collective-list tbody tr") == len(report["collectives"]) == 30
    assert count(page, "#kind-table tbody tr") == len(report["kinds"])
    assert count(page, "#pass-list .pass") == len(report["passes"]) == 12
    assert count(page, "#replays .item") == 3 and count(page, "#replays .item.bad") == 1
    assert "not replayed: beyond the largest bucket" in words(page, "#replays table")
    assert "steps that took it" in words(page, "#bucket-chart")
    assert page.ask("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling of the page"
    boxes = "[...document.querySelectorAll('#layers .item')].map((n) => n.getBBox()).every((b) => b.width > 5)"
    assert page.ask(boxes)


def test_search_by_layer(page: Browser, dump: Dump) -> None:
    report = dump[1]["body-sharded"]
    page.press("/")
    assert page.ask("document.activeElement.id") == "find"
    page.type("layer 7")
    expected = {piece["number"] for piece in report["pieces"] if 7 in piece["layers"]}
    assert bright(page) == expected and 5 < len(expected) < 20
    rows = page.ask("[...document.querySelectorAll('#layers .item:not(.dim)')].map((n) => n.dataset.layer)")
    assert set(rows) == {"7"}, "a segment that began above is lit in its layer alone"
    buffers = [buffer["name"] for buffer in report["buffers"] if buffer["name"].startswith("L7.")]
    assert page.ask("[...document.querySelectorAll('[data-buffer]')].map((n) => n.dataset.buffer)") == buffers
    assert words(page, "#found") == (f"{len(expected)} instructions, {len(buffers)} buffers and 3 collectives match")
    assert count(page, "#collective-list tbody tr") == 3
    page.press("Enter")
    first = min(expected)
    assert words(page, "#detail h3").startswith(f"{first}. ") and count(page, "#layers .pinned") >= 1
    page.press("Enter", "Escape", "Escape")
    assert bright(page) == {piece["number"] for piece in report["pieces"]}, "the first lets go, the second clears"
    assert words(page, "#found") == ""


def test_search_by_name(page: Browser, dump: Dump) -> None:
    report = dump[1]["body-sharded"]
    page.press("/")
    page.type("L3.attend")
    touching = {
        piece["number"]
        for piece in report["pieces"]
        if "L3.attend" in [*piece["writes"], *(operand["name"] for operand in piece["inputs"])]
    }
    assert bright(page) == touching and len(touching) == 2
    assert page.ask("[...document.querySelectorAll('[data-buffer]')].map((n) => n.dataset.buffer)") == ["L3.attend"]
    page.click("#buffer-table summary")
    page.wait("document.querySelector('#buffer-table tbody') !== null")
    assert count(page, "#buffer-table tbody tr") == 1 and words(page, "#buffer-table mark") == "L3.attend"
    page.click("[data-pass=place] summary")
    page.wait("document.querySelector('[data-pass=place] pre').textContent !== ''")
    shown = words(page, "[data-pass=place] pre")
    assert "L3.gather_rows[0]" in shown and "L4.gather_rows" not in shown
    page.ask("document.getElementById('find').select()")
    page.ask("document.getElementById('find').focus()")
    page.type("layers.9.attn.wo_a.weight")
    reads = {
        piece["number"]
        for piece in report["pieces"]
        if "layers.9.attn.wo_a.weight" in [operand["name"] for operand in piece["inputs"]]
    }
    assert bright(page) == reads and len(reads) == 1
    page.ask("document.getElementById('find').select()")
    page.type("no such thing")
    assert bright(page) == set() and "0 instructions, 0 buffers" in words(page, "#found")
    assert "No buffer has such a name." in words(page, "#lifelines")


def test_programs_and_address(page: Browser, dump: Dump) -> None:
    page.click("#tab-epilogue")
    assert count(page, "#layers .item.collective") == 0
    assert set(page.ask("[...document.querySelectorAll('#layers .item')].map((n) => Number(n.dataset.piece))")) == {
        piece["number"] for piece in dump[1]["epilogue"]["pieces"]
    }
    assert "None: no rows move" in words(page, "#collective-list")
    assert "steps that took it" not in words(page, "#bucket-chart"), "the log has buckets of prelude and body"
    page.press("ArrowRight")
    assert page.ask("document.activeElement.id") == "tab-body-sharded", "arrows go round"
    assert count(page, "#layers .item.collective") == 30
    page.press("/")
    page.type("select")
    fragment = page.ask("location.hash")
    assert fragment == "#program=body-sharded&find=select"
    lit = bright(page)
    page.call("Page.navigate", url="about:blank")
    page.open(dump[0].as_uri() + fragment)
    assert page.ask("document.getElementById('find').value") == "select" and bright(page) == lit


def test_keyboard(page: Browser, dump: Dump) -> None:
    """One stop of Tab for the picture; arrows along instructions and layers; the detail follows."""
    pieces = dump[1]["body-sharded"]["pieces"]
    assert count(page, "#layers [tabindex='0']") == 1
    page.ask("document.querySelector('#legend button:last-of-type').focus()")
    page.press("Tab")
    assert page.ask("document.activeElement.dataset.piece") == "0"
    assert words(page, "#detail h3") == f"0. segment {pieces[0]['of']}"
    page.press("ArrowRight")
    assert page.ask("document.activeElement.dataset.piece") == "1"
    assert pieces[1]["why"] in words(page, "#detail") and "A rank brings" in words(page, "#detail")
    page.press("ArrowDown")
    assert page.ask("document.activeElement.dataset.layer") == "1"
    page.press("Enter")
    pinned = page.ask("document.querySelector('#layers .pinned').dataset.piece")
    page.press("End")
    assert page.ask("document.activeElement.dataset.piece") == str(pieces[-1]["number"])
    assert words(page, "#detail h3").startswith(f"{pinned}. "), "what is pinned stays"
    page.press("Escape", "Home")
    assert words(page, "#detail h3").startswith("0. ")
    name = pieces[0]["writes"][0]
    page.ask(
        f"[...document.querySelectorAll('#detail button')].find((b) => b.textContent === {json.dumps(name)}).click()"
    )
    assert page.ask("document.getElementById('find').value") == name and 0 in bright(page)
    page.ask("document.querySelector('#lifelines [tabindex=\"0\"]').focus()")
    assert words(page, "#tip").startswith(f"{name}: ") and not page.ask("document.getElementById('tip').hidden")


def test_what_a_start_measured(page: Browser, dump: Dump) -> None:
    """Of the program that was started alone: how it was compiled and captured."""
    report = dump[1]["epilogue"]
    assert "all backends are reference" in words(page, "#region-list") and count(page, "#region-list table") == 0
    assert "inductor" not in words(page, "#summary") and "captured in" not in words(page, "#bucket-chart")
    assert count(page, "#layers .under") == 0 and "underlined" not in words(page, "#legend")
    page.click("#tab-epilogue")
    tiles = dict(zip(texts(page, "#summary dt"), texts(page, "#summary dd"), strict=True))
    regions, kinds = sum(region["count"] for region in report["regions"]), len(report["regions"])
    assert tiles["compile"] == f"inductor{regions} regions of {kinds} kinds in {1.5 * kinds:.1f} s"
    assert tiles["CUDA graphs"].startswith("55")
    assert count(page, "#layers .under") == regions and "underlined: a region" in words(page, "#legend")
    for name in ("captured in, seconds", "bytes by which the pool grew", "bytes that the graphs take"):
        assert name in words(page, "#bucket-chart")
    page.click("#bucket-table summary")
    page.wait("document.querySelector('#bucket-table tbody') !== null")
    assert texts(page, "#bucket-table tr:last-child td")[-3:] == ["0.15 s", "5 MB", "4.48 MB"]
    page.ask("document.querySelector('#bucket-chart [tabindex=\"0\"]').focus()")
    page.press("End")
    label = page.ask("document.activeElement.getAttribute('aria-label')")
    assert "5 CUDA graphs captured in 0.15 s; the pool grew by 5 MB, the graphs take 4.48 MB" in label
    assert f"{kinds} kinds compiled" in words(page, "#region-list")
    rows = "#region-list > .table:nth-of-type(1) tbody tr"
    assert texts(page, f"{rows} td:nth-child(2)") == [region["name"] for region in report["regions"]]
    assert texts(page, f"{rows}:first-child td")[2:6] == ["20", "0-9", "1.50", "no"]
    assert "check_input_liveness" in words(page, "#region-list > .table:last-child")
    page.ask(f"document.querySelector('{rows} summary').focus()")
    page.press("Enter")
    page.wait(f"document.querySelector('{rows} details').open")
    assert words(page, f"{rows} pre") == report["regions"][0]["text"]
    page.press("/")
    page.type("index_query")
    assert texts(page, f"{rows} td:nth-child(2)") == ["index_query.torch"]


def test_dark_and_narrow(browser: Browser, page: Browser) -> None:
    """The colours follow the system; a narrow window scrolls its drawings, not the page."""
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.ask(colour)
    for scheme in ("dark", "light"):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert (page.ask(colour) == light) == (scheme == "light")
    page.size(800, 900)
    try:
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")
        assert count(page, "#layers .item") > 30
    finally:
        page.size(1440, 900)


def test_errors_are_heard(browser: Browser, tmp_path: Path) -> None:
    """The tests above would notice: an exception, a message, and a file from elsewhere."""
    broken = tmp_path / "broken.html"
    broken.write_text("<img src='gone.png'><script>console.error('said');</script><script>nothing();</script>")
    browser.heard.clear()
    browser.requests.clear()
    browser.open(broken.as_uri())
    browser.ask("1")
    heard = " ".join(browser.heard)
    assert "said" in heard and "nothing is not defined" in heard
    assert any(request.endswith("gone.png") for request in browser.requests)
