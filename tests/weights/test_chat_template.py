import json
from collections.abc import Mapping, Sequence

import pytest

from mmserve.errors import RequestError
from mmserve.weights.chat_template import RenderedPiece, render_chat

USER = [{"role": "user", "content": "hi"}]
CONTROL = ("<|end|>", "<think>", "</think>")


def render(template: str, messages: Sequence[Mapping[str, object]] = USER, **variables: object) -> str:
    return "".join(piece.text for piece in render_chat(template, messages, CONTROL, variables))


def test_pieces_tell_the_template_s_tokens_from_the_user_s() -> None:
    message = {"role": "user", "content": "a<|end|>b"}
    assert render_chat("{{ messages[0].content }}<|end|>", [message], CONTROL, {}) == [
        RenderedPiece("a", is_text=False),
        RenderedPiece("<|end|>", is_text=True),
        RenderedPiece("b<|end|>", is_text=False),
    ]


def test_templates_can_still_look_for_tokens_in_messages() -> None:
    template = "{{ messages[0].content.split('</think>')[-1] }}"
    assert render(template, [{"role": "assistant", "content": "<think>no</think>yes"}]) == "yes"


def test_a_torn_marker_does_not_let_text_join_into_a_token() -> None:
    template = "{{ messages[0].content.split('<think>')[0] }}end|>"
    pieces = render_chat(template, [{"role": "user", "content": "<|<think>"}], CONTROL, {})
    assert [piece.text for piece in pieces] == ["<|", "end|>"]


@pytest.mark.parametrize("filters", ["upper | lower", "tojson(ensure_ascii=True)", "escape", "title", "trim", "e | e"])
def test_filters_do_not_lose_the_markers(filters: str) -> None:
    message = {"role": "user", "content": "1<think>2"}
    pieces = render_chat("{{ messages[0].content | %s }}" % filters, [message], ("<think>", "think"), {})  # noqa: UP031
    assert "think" not in "".join(piece.text.lower() for piece in pieces if not piece.is_text)


def test_tools_are_marked_too() -> None:
    pieces = render_chat("{{ tools | tojson }}", USER, CONTROL, {"tools": [{"name": "<|end|>"}]})
    assert RenderedPiece("<|end|>", is_text=True) in pieces


def test_whitespace_follows_transformers() -> None:
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_tojson_leaves_html_and_unicode_alone() -> None:
    assert render("{{ v | tojson(indent=1) }}", v={"a": "<é>"}) == json.dumps(
        {"a": "<é>"}, indent=1, ensure_ascii=False
    )


def test_loop_controls_dates_and_generation_blocks_work() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_absent_values_are_dropped() -> None:
    template = "{{ 'tool_calls' in messages[0] }}"
    assert render(template, [{"role": "assistant", "content": "x", "tool_calls": None}]) == "False"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "refused"),
        ("{{ messages[0].content + 1 }}", "refused"),
        ("{{ messages[7].content.x }}", "refused"),
        ("{{ 1 / 0 }}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ range(10000000) | list }}", "refused"),
    ],
)
def test_a_failing_template_is_a_bad_request(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(template)
    assert caught.value.code == "invalid_request"


PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<img>{% elif p.text is defined %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
STRINGS_OR_PARTS = (
    "{% for m in messages %}{% if m.content is string %}S{{ m.content }}{% else %}P{% endif %}{% endfor %}"
)
WITH_PICTURE = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}
]


def test_pictures_keep_their_place_among_texts() -> None:
    assert render(PARTS, WITH_PICTURE) == "a<img>b"
    assert render(STRINGS_OR_PARTS, WITH_PICTURE) == "P"


def test_a_template_that_passes_over_strings_gets_parts() -> None:
    assert render(PARTS, USER) == "hi"
    assert render(STRINGS_OR_PARTS, USER) == "Shi"
    only_texts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(STRINGS_OR_PARTS, only_texts) == "Sa\nb"


def test_a_control_token_beside_a_picture_stays_text() -> None:
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<|end|>"}]}
    assert RenderedPiece("<|end|>", is_text=True) in render_chat(PARTS, [message], CONTROL, {})


def test_other_parts_are_refused() -> None:
    with pytest.raises(RequestError, match="text and image"):
        render(PARTS, [{"role": "user", "content": [{"type": "video"}]}])


def test_a_template_without_places_for_pictures_says_what_it_misses() -> None:
    with pytest.raises(RequestError, match="chat template refused"):
        render("{{ '<s>' + messages[0].content }}", WITH_PICTURE)
