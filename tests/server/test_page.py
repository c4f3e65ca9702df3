"""The page at ``/`` in a real browser, over a stub: it talks, it shows reasoning apart, and it tells how things are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from octavo.graphs.dump import PAGE
from octavo.runtime.server.engine_interface import EngineState
from octavo.runtime.server.page import REPORT
from tests.browser import Browser, count, needs_browser, texts, words
from tests.server.real_server import wait_for
from tests.server.running import Served, serve
from tests.server.stub_client import MODEL, TEXT, THOUGHT, TOKENIZER, greeting

KEY = "page"
READY = "document.getElementById('phase').dataset.phase === 'ready'"
IDLE = "document.getElementById('stop').disabled"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Browser]:
    """The page, newly opened, of a server that is ready; nothing is heard of it, and it asks this server alone."""
    open_page(browser, server)
    browser.wait(READY)
    yield browser
    assert browser.heard == []
    assert all(request.startswith(address(server)) for request in browser.requests)


def address(server: Served) -> str:
    return str(server.http.base_url)


def open_page(browser: Browser, server: Served) -> None:
    browser.call("Page.navigate", url="about:blank")
    browser.heard.clear()
    browser.requests.clear()
    browser.open(f"{address(server)}/")


def say(page: Browser, text: str) -> None:
    page.ask("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter")


def test_the_page_needs_nothing_else(server: Served) -> None:
    """One file, which loads nothing and may load nothing; no report without a dump."""
    response = server.http.get("/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "http://" not in response.text and "https://" not in response.text and "{{" not in response.text
    assert server.http.get("/graphs").status_code == 404
    assert not {"/", "/graphs"} & server.http.get("/openapi.json").json()["paths"].keys()


@needs_browser
def test_chat_with_reasoning(page: Browser, server: Served) -> None:
    """Reasoning is shown apart, folded once the answer begins; the next turn tells the model what it said."""
    server.stub.token_seconds = 0.005
    say(page, "Grüße 🐙")
    page.wait("document.querySelector('.reasoning')?.textContent !== ''")
    page.wait(IDLE)
    assert texts(page, ".turn.user") == ["Grüße 🐙"]
    assert words(page, ".reasoning") == THOUGHT and words(page, ".assistant .text") == TEXT
    assert not page.ask("document.querySelector('.thinking').open")
    assert " tokens in " in words(page, ".note")
    assert page.ask("document.getElementById('text').value") == ""
    page.click("#thinking")
    say(page, "And now?")
    page.wait("document.querySelectorAll('.assistant').length === 2")
    page.wait(IDLE)
    assert count(page, ".thinking:not([hidden])") == 1 and not server.submit.thinking
    prompt = TOKENIZER.decode(server.submit.prompts[0])
    assert [prompt.find(part) > 0 for part in ("Grüße 🐙", TEXT, "And now?")] == [True] * 3
    page.click("#forget")
    say(page, "Forgotten?")
    page.wait("document.querySelectorAll('.assistant .note:not(:empty)').length === 1")
    assert "And now?" not in TOKENIZER.decode(server.submit.prompts[0])


@needs_browser
def test_an_answer_comes_as_it_is_made_and_can_be_stopped(page: Browser, server: Served) -> None:
    server.stub.answer = lambda submit, index: "I think.</think>" + "word " * 150
    server.stub.token_seconds = 0.02
    say(page, "Tell me much.")
    page.wait("document.querySelector('.assistant .text')?.textContent.length > 20")
    assert not page.ask(IDLE) and len(words(page, ".assistant .text")) < 700
    page.press("Escape")
    page.wait(IDLE)
    assert words(page, ".note") == "stopped"
    server.wait_until_free()
    assert list(server.stub.aborted) == [server.submit.id]
    server.stub.answer, server.stub.token_seconds = greeting, 0.0
    say(page, "Short, please.")
    page.wait("document.querySelectorAll('.assistant .note:not(:empty)').length === 2")
    assert texts(page, ".assistant .text")[1] == TEXT


@needs_browser
def test_answers_are_text(page: Browser, server: Served) -> None:
    """What looks like markup is shown as it was written."""
    server.stub.answer = lambda submit, index: "a</think><img src=x onerror=alert(1)><b>bold</b>\n&amp; <script>"
    say(page, "<i>markup</i>")
    page.wait("document.querySelector('.note')?.textContent !== ''")
    assert words(page, ".assistant .text") == "<img src=x onerror=alert(1)><b>bold</b>\n&amp; <script>"
    assert texts(page, ".turn.user") == ["<i>markup</i>"] and count(page, "#log img, #log b, #log i") == 0


@needs_browser
def test_the_state_of_the_engine(page: Browser) -> None:
    page.wait("document.querySelectorAll('#steps dt').length > 0")
    assert words(page, "#model") == MODEL and words(page, "#phase") == "ready"
    shown = dict(zip(texts(page, "#state dt"), texts(page, "#state dd"), strict=True))
    assert shown["in work"] == "0" and shown["longest context"] == "1000"
    assert page.ask("getComputedStyle(document.getElementById('report')).display") == "none"
    page.size(420, 800)
    try:
        assert page.ask("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
    finally:
        page.size(1440, 900)


@needs_browser
def test_what_goes_wrong_is_told(browser: Browser, server: Served) -> None:
    """A full queue, an answer that breaks off, and an engine that starts and breaks."""
    open_page(browser, server)
    browser.wait(READY)
    server.stub.most_open = 0
    say(browser, "Anyone?")
    browser.wait("document.querySelector('.note.bad')?.textContent === 'Too many requests wait.'")
    server.stub.most_open, server.stub.gone_after = None, 2
    say(browser, "Again.")
    browser.wait("document.querySelectorAll('.note.bad')[1]?.textContent.includes('killed')")
    server.stub.state = EngineState(phase="starting", detail="weights", done=1, total=4)
    browser.wait("document.getElementById('phase').textContent === 'starting: weights 25 %'")
    server.stub.state = EngineState(phase="broken", detail="out of memory")
    browser.wait("document.getElementById('phase').textContent === 'broken: out of memory'")


@needs_browser
def test_a_key_and_a_report(browser: Browser, tmp_path: Path) -> None:
    """With --api-key the page asks for one; with --dump-dir it opens the report, which may need the key too."""
    assert REPORT == PAGE
    (tmp_path / REPORT).write_text("<title>the report</title>")
    with serve(api_key=(KEY,), dump_dir=tmp_path) as locked:
        assert httpx.get(f"{address(locked)}/graphs").status_code == 401
        open_page(browser, locked)
        browser.wait("!document.getElementById('key-label').hidden")
        browser.ask("document.getElementById('key').focus()")
        browser.type(KEY)
        browser.wait("document.querySelectorAll('#steps dt').length > 0")
        say(browser, "Hello")
        browser.wait(f"document.querySelector('.assistant .text')?.textContent === {json.dumps(TEXT)}")
        browser.click("#report")
        wait_for(lambda: any(url.startswith("blob:") and title == "the report" for url, title in tabs(browser)))


def tabs(browser: Browser) -> list[tuple[str, str]]:
    """Address and title of every page that is open."""
    found = browser.call("Target.getTargets")["targetInfos"]
    return [(target["url"], target["title"]) for target in found if target["type"] == "page"]
