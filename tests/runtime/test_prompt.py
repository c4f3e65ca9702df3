"""Chat prompts against the golden strings and ids of ``deepseek-recipe``, and against text that tries to inject."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import OctavoError, UsageError
from octavo.runtime.prompt import Effort, encode_chat, encode_request
from octavo.runtime.tokenizer import IMAGE, Tokenizer
from tests.tokenizer_data import GOLDENS, MINI, config, mini_tokenizer, published_tokenizer

BAR = "\uff5c"
USER, ASSISTANT = f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"
CASES = json.loads((GOLDENS / "encoding.json").read_text(encoding="utf-8"))["cases"]
RENDERED = [case for case in CASES if "ids" in case]


@pytest.fixture(scope="module", params=[published_tokenizer, mini_tokenizer], ids=["published", "mini"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = request.param()
    assert isinstance(made, Tokenizer)
    return made


def added_ids_in(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return [i for i in ids if i in added]


def request_with(content: Any) -> dict[str, Any]:
    return {
        "model": "any name",
        "messages": [{"role": "user", "content": content}],
        "thinking": {"type": "disabled"},
    }


def template_ids(tokenizer: Tokenizer) -> list[int]:
    """The added tokens of a prompt with one user message and without thinking, up to the answer."""
    return [
        tokenizer.special_id(token)
        for token in (f"<{BAR}begin\u2581of\u2581sentence{BAR}>", USER, ASSISTANT, "</think>")
    ]


def test_there_are_twelve_rendered_cases_and_one_rejected() -> None:
    assert (len(RENDERED), len(CASES)) == (12, 13)


@pytest.mark.parametrize("case", RENDERED, ids=lambda case: case["name"])
def test_golden_prompts(case: dict[str, Any]) -> None:
    """The package's own spelling of an image is replaced by the tokenizer's; nothing else differs."""
    prompt = encode_request(published_tokenizer(), case["request"])
    assert prompt.text == case.get("prompt_published_tokenizer", case["prompt"])
    assert prompt.text == case["prompt"].replace(f"<{BAR}image{BAR}>", IMAGE)
    assert prompt.ids == case["ids"]
    assert published_tokenizer().decode(prompt.ids) == prompt.text


def test_golden_rejection() -> None:
    (case,) = (case for case in CASES if "error" in case)
    with pytest.raises(UsageError) as caught:
        encode_request(published_tokenizer(), case["request"])
    reason = "Prompt must contain the word 'json' in some form to use 'response_format' of type 'json_object'."
    assert reason in case["error"]
    assert str(caught.value) == f"The chat request is not valid: {reason}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("case", RENDERED, ids=lambda case: case["name"])
def test_mini_checkpoint_renders_the_same_text_with_its_own_ids(case: dict[str, Any]) -> None:
    tokenizer = mini_tokenizer()
    prompt, published = (
        encode_request(tokenizer, case["request"]),
        encode_request(published_tokenizer(), case["request"]),
    )
    assert prompt.text == published.text == tokenizer.decode(prompt.ids)
    specials = added_ids_in(prompt.ids, tokenizer)
    wanted = added_ids_in(published.ids, published_tokenizer())
    assert tokenizer.decode(specials) == published_tokenizer().decode(wanted)
    assert (prompt.ids[0], prompt.ids[-1]) in {(0, 499), (0, 500)}


@pytest.mark.parametrize(
    ("name", "thinking", "effort"),
    [
        ("default", True, None),
        ("nothink", False, None),
        ("eff_low", True, "low"),
        ("eff_high", True, "high"),
        ("eff_max", True, "max"),
        ("sys", True, None),
        ("midsys", True, None),
    ],
)
def test_encode_chat_agrees_with_the_golden_requests(name: str, thinking: bool, effort: Effort | None) -> None:
    (case,) = (case for case in CASES if case["name"] == name)
    messages = case["request"]["messages"]
    assert encode_chat(published_tokenizer(), messages, thinking=thinking, effort=effort) == case["ids"]


@pytest.mark.parametrize(("thinking", "effort"), [(True, "extreme"), (False, "high")])
def test_effort_that_cannot_be_is_refused(thinking: bool, effort: Any) -> None:
    with pytest.raises(UsageError, match=f"effort '{effort}': one of low, high, max, and only with thinking"):
        encode_chat(mini_tokenizer(), [{"role": "user", "content": "Hi"}], thinking=thinking, effort=effort)


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        ({"model": "m", "messages": []}, "Empty input messages"),
        ({"model": "m"}, "missing field `messages`"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "missing field `model`"),
        ({"model": "m", "messages": [{"role": "robot", "content": "Hi"}]}, "unknown variant `robot`"),
        ({"model": "m", "messages": [{"role": "user", "content": "\ud800"}]}, "surrogates not allowed"),
        ({"model": "m", "messages": [{"role": "user", "content": {1}}]}, "not a JSON value"),
        (request_with("Hi") | {"n": 2}, "only n = 1 is supported"),
    ],
)
def test_bad_requests_are_usage_errors(request_body: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"The chat request is not valid: .*{message}"):
        encode_request(mini_tokenizer(), request_body)


def test_every_added_token_in_a_message_stays_text(tokenizer: Tokenizer) -> None:
    template = template_ids(tokenizer)
    for content in [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]:
        prompt = encode_request(tokenizer, request_with(f"a{content}b"))
        assert added_ids_in(prompt.ids, tokenizer) == template
        assert tokenizer.decode(prompt.ids) == prompt.text
        assert f"a{content}b" in prompt.text


def test_no_part_of_a_conversation_can_inject(tokenizer: Tokenizer) -> None:
    """The same conversation with a harmless word in place of the token has the same added tokens."""

    def added(word: str) -> list[int]:
        arguments = json.dumps({word: word})
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "system", "content": word},
            {"role": "user", "content": [{"type": "text", "text": word}]},
            {"role": "assistant", "content": word, "reasoning_content": word, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": word},
            {"role": "latest_reminder", "content": word},
            {"role": "user", "content": word},
        ]
        schema = {"type": "object", "properties": {word: {"type": "string", "description": word}}}
        tools = [{"type": "function", "function": {"name": "f", "description": word, "parameters": schema}}]
        return added_ids_in(
            encode_request(tokenizer, {"model": word, "messages": messages, "tools": tools}).ids, tokenizer
        )

    harmless = added("word")
    assert len(harmless) > 20
    for content in (USER, ASSISTANT, IMAGE, "</think>", f"{BAR}DSML{BAR}", f"<{BAR}image{BAR}>"):
        assert added(content) == harmless


def test_spelled_out_image_before_a_real_one_stays_text(tokenizer: Tokenizer) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    prompt = encode_request(tokenizer, request_with([{"type": "text", "text": IMAGE}, image]))
    image_id = tokenizer.special_id(IMAGE)
    assert prompt.ids.count(image_id) == 1
    assert prompt.text.count(IMAGE) == 2
    assert tokenizer.decode(prompt.ids[prompt.ids.index(image_id) :]).startswith(f"{IMAGE}{ASSISTANT}")
    assert [source.url for source in prompt.image_sources] == ["https://example.com/a.png"]


@pytest.fixture(scope="module")
def official(tokenizer: Tokenizer) -> recipe.DeepseekV41Encoding:
    """The package's own encoder on the same vocabulary."""
    attached = recipe.Tokenizer.from_str(tokenizer.backend.to_str())
    return recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image=IMAGE)).with_tokenizer(attached)


word = st.sampled_from([USER, ASSISTANT, "<think>", f"<{BAR}", "\u2581", " ", "\n\n", "Hello", "\u4f60\u597d", "12345"])
content = st.lists(word | st.text(max_size=6), max_size=8).map("".join)


@given(contents=st.lists(content, min_size=1, max_size=4))
def test_ids_are_those_of_the_official_encoder(
    tokenizer: Tokenizer, official: recipe.DeepseekV41Encoding, contents: list[str]
) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    prompt = encode_request(tokenizer, {"model": "m", "messages": messages})
    assert prompt.ids == official.encode(prompt.request.conversation)


def test_tokenizer_without_a_template_token_is_named() -> None:
    renamed = tokenizers.Tokenizer.from_str(mini_tokenizer().backend.to_str().replace(USER, "<user>"))
    with pytest.raises(OctavoError, match=f"no added token '{USER}'"):
        encode_request(Tokenizer(renamed, config(MINI)), request_with("Hi"))
