"""One conversation in the forms that clients write renders alike, in the form that each template takes."""

from __future__ import annotations

import json
import time
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers import AddedToken

from ferrule_server.errors import InvalidRequest
from ferrule_server.text.chat_template import ChatTemplate, Conversation
from ferrule_server.text.stand_ins import render_guarded
from ferrule_server.text.template_process import RenderLimits
from ferrule_server.text.tokenizer import Tokenizer
from ferrule_server.text.tokenizer_config import TokenizerConfig
from tests.text.chat_models import CHATML, tokenizer_of
from tests.text.conversations import WEATHER, said

END = "<|im_end|>"
TEXTS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
EITHER = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %};{% endfor %}"
)
NOT_OF_SYSTEM = EITHER.replace("{% if", "{% if m.role == 'system' %}{{ m.content | trim }}{% elif")
CALLS = (
    "{%% for m in messages %%}{%% if m.tool_calls %%}{%% for c in m.tool_calls %%}[%s]{%% endfor %%}"
    "{%% else %%}{{ m.content }};{%% endif %%}{%% endfor %%}"
)
OBJECT, TEXT = {"city": "K\u00f6ln"}, '{"city": "K\u00f6ln"}'
BOTH_PARTS: list[Any] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
PICTURE: list[Any] = [{"type": "text", "text": "a"}, {"type": "image"}]


def template(source: str, **limits: Any) -> ChatTemplate:
    """Return a template."""
    return ChatTemplate(TokenizerConfig(chat_templates={"default": source}), RenderLimits(**limits))


def rendered(source: str, *messages: Any, **options: Any) -> str:
    """Return the text of messages."""
    return template(source).render(Conversation(messages, **options))


def called(arguments: Any, content: Any = "", **more: Any) -> dict[str, Any]:
    """Return a message that calls a tool."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (TEXTS, BOTH_PARTS, "user:ab;"),
        (TEXTS.replace("m.content", "m.content | trim"), BOTH_PARTS, "user:ab;"),
        (TEXTS.replace("m.content", "m.content | tojson"), BOTH_PARTS, 'user:"ab";'),
        (TEXTS.replace("m.content", "'' + m.content"), BOTH_PARTS, "user:ab;"),
        (TEXTS.replace("m.content", "m.content.split('</think>')[-1]"), BOTH_PARTS, "user:ab;"),
        (PARTS, "ab", "user:ab;"),
        (PARTS, BOTH_PARTS, "user:ab;"),
        (EITHER, "ab", "user:ab;"),
        (EITHER, BOTH_PARTS, "user:<a><b>;"),
        (EITHER, PICTURE, "user:<a><>;"),
        (TEXTS, [], "user:;"),
    ],
)
def test_a_content_has_the_form_that_the_template_takes(source: str, content: Any, expected: str) -> None:
    """Parts are joined, a text becomes a part, and what the template takes is left as it is."""
    assert rendered(source, {"role": "user", "content": content}) == expected


def test_each_role_has_its_form() -> None:
    """Many templates take parts of a user alone."""
    messages = [{"role": role, "content": BOTH_PARTS} for role in ("system", "user", "assistant", "tool")]
    assert rendered(NOT_OF_SYSTEM, *messages) == "system:ab;user:<a><b>;assistant:<a><b>;tool:<a><b>;"


@pytest.mark.parametrize(
    ("write", "arguments", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", TEXT, TEXT),
        ("{{ c.function.arguments | tojson }}", OBJECT, TEXT),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", TEXT, "city=K\u00f6ln"),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", TEXT, "city=K\u00f6ln"),
        ("{{ c.function.arguments }}", TEXT, TEXT),
        ("{{ c.function.arguments }}", OBJECT, TEXT),
        ("{{ 'f' + c.function.arguments }}", OBJECT, "f" + TEXT),
        (
            "{% if c.function.arguments is string %}T{% else %}O{% endif %}{{ c.function.arguments | string }}",
            TEXT,
            "T",
        ),
        ("{{ c.function.arguments | tojson }}", '{"city": "K', json.dumps('{"city": "K')),
        ("{{ c.function.arguments | tojson }}", "[1]", '"[1]"'),
        ("{{ c.function.arguments | tojson }}", "[" * 9000, json.dumps("[" * 9000)),
        ("{{ c.function.arguments | tojson }}", None, "null"),
    ],
)
def test_arguments_have_the_form_that_the_template_takes(write: str, arguments: Any, expected: str) -> None:
    """An object, or its JSON text; broken JSON stays text."""
    assert rendered(CALLS % write, said("user", "x"), called(arguments)).startswith(f"x;[{expected}")


def test_calls_without_a_function_and_broken_ones_stay() -> None:
    """Arguments may stand beside the name; whatever is no call is the template's."""
    source = CALLS % "{{ (c.function or c).arguments | tojson }}"
    calls = [{"name": "f", "arguments": TEXT}, {"function": {"name": "f", "arguments": TEXT}}, {"function": "f"}, 7]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    forms = template(source)._forms["default"]
    assert forms.adapted(message)["tool_calls"][:2] == [
        {"name": "f", "arguments": OBJECT},
        {"function": {"name": "f", "arguments": OBJECT}},
    ]
    assert forms.adapted(message)["tool_calls"][2:] == calls[2:]
    assert forms.adapted({**message, "tool_calls": "?"})["tool_calls"] == "?"


NULLS = {
    "asks whether it is null": ("{% if m.content is none %}N{% else %}{{ m.content | length }}{% endif %}", "N"),
    "fails with null": ("{{ m.content | default('none given') | length }}", "10"),
    "fails without a content": ("{{ m.content or '-' if m.content is defined else 1 / 0 }}", "-"),
    "would write Python's word": ("{{ m.content }}", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NULLS)
@pytest.mark.parametrize("extra", [{}, {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}])
def test_a_null_content_is_kept_or_left_out(name: str, extra: dict[str, Any]) -> None:
    """As the template takes it."""
    write, expected = NULLS[name]
    source = f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{write}{{% endif %}}{{% endfor %}}"
    message = {"role": "assistant", "content": None, **extra}
    assert rendered(source, said("user", "x"), message) == expected


def test_a_null_content_is_left_out_if_the_template_fails_with_it() -> None:
    """Only with this conversation, so it was not found at the start."""
    source = "{% for m in messages %}{% if m.mark and m.content is none %}{{ 1 / 0 }}{% endif %}x{% endfor %}"
    assert rendered(source, {"role": "assistant", "content": None, "mark": True}) == "x"


def test_a_missing_content_is_an_empty_text_if_the_template_adds_to_it() -> None:
    """Many templates that know no calls of tools do."""
    for message in (called({}), called({}, None), {"role": "assistant", "content": None}):
        assert rendered("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}", message) == "assistant:"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "<|im_start|>system\nS<|im_end|>\n"),
        (TEXTS.replace("{{ m.role }}", "{% if m.role not in ['user', 'system'] %}{% continue %}{% endif %}"), ":S;"),
        (TEXTS.replace("{{ m.role }}", "{{ {'user': 'U', 'system': 'S'}[m.role] + '' }}"), "S:S;"),
        (TEXTS.replace("{{ m.role }}", "{{ m.role | upper }}"), "SYSTEM:S;"),
        (TEXTS.replace("{{ m.role }}", "{{ 'D' if m.role == 'developer' else m.role }}"), "D:S;"),
        (TEXTS.replace("{{ m.role }}", "{{ 1 / 0 if m.role == 'system' else m.role }}"), "developer:S;"),
    ],
)  # fmt: skip
def test_a_developer_is_the_system_where_the_template_knows_no_developer(source: str, expected: str) -> None:
    """A name in the header that any other role would get too does not mean that it is known."""
    asked = Conversation([said("developer", "S"), said("user", "U")], add_generation_prompt=False)
    assert template(source).render(asked).startswith(expected)


def test_a_conversation_that_is_refused_in_another_form_is_rendered_as_given() -> None:
    """So nothing that a template takes is refused."""
    source = TEXTS.replace("{{ m.role }}", "{{ 1 / 0 if m.role == 'system' and not loop.first else m.role }}")
    assert rendered(source, said("user", "U"), said("developer", "S")) == "user:U;developer:S;"
    with pytest.raises(InvalidRequest, match="refuses them"):
        rendered(source, said("user", "U"), said("system", "S"))


def test_each_template_of_a_model_has_its_forms() -> None:
    """That for tools may need tools."""
    tools = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ 1 / (tools | length) }}" + PARTS
    both = ChatTemplate(TokenizerConfig(chat_templates={"default": TEXTS, "tool_use": tools}))
    asked = {"role": "user", "content": BOTH_PARTS}
    assert both.render(Conversation([asked])) == "user:ab;"
    assert both.render(Conversation([{**asked, "content": "ab"}], [WEATHER])) == "get_weather1.0user:ab;"


def test_a_slow_template_delays_no_start_for_long() -> None:
    """Its messages stay as they are."""
    slow = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    begin_s = time.monotonic()
    made = template("{% if messages | length > 1 %}" + slow + "{% endif %}{{ messages[0].content }}", max_time_s=0.5)
    assert time.monotonic() - begin_s < 20
    assert made.render(Conversation([said("user", "x")])) == "x"


def test_usual_conversations_are_rendered_once() -> None:
    """The forms are found when the template is loaded."""
    made = template(CALLS % "{{ c.function.arguments | tojson }}")
    with patch.object(made._processes, "render", wraps=made._processes.render) as render:
        made.render(Conversation([said("user") | {"content": BOTH_PARTS}, called(TEXT, None)]))
    assert render.call_count == 1


CONTINUED = {
    "kept": (CHATML, "Hello, \n ", "<|im_start|>assistant\nHello, \n "),
    "trimmed": (CHATML.replace("m.content", "m.content | trim"), " Hello, \n ", "<|im_start|>assistant\nHello,"),
    "empty": (CHATML, "", "<|im_start|>assistant\n"),
    "parts": (PARTS, BOTH_PARTS, "assistant:ab"),
    "parts that are joined": (TEXTS, BOTH_PARTS, "assistant:ab"),
    "after a thought": (TEXTS.replace("m.content", "m.content.split('</think>') | last"), "a</think>b", "assistant:b"),
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("prompts", [False, True])
def test_a_continued_message_ends_the_text(name: str, prompts: bool) -> None:
    """Without what ends a turn, and without the header of another one."""
    source, content, expected = CONTINUED[name]
    messages = [said("user", "Hello, "), {"role": "assistant", "content": content}]
    text = rendered(source, *messages, add_generation_prompt=prompts, continue_final_message=True)
    assert text.endswith(expected)
    assert text.count("assistant") == 1


@pytest.mark.parametrize("content", [None, PICTURE, [["a"]], 7])
def test_a_message_without_a_text_cannot_be_continued(content: Any) -> None:
    """Nor one of which the template leaves out the end."""
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        rendered(TEXTS, {"role": "assistant", "content": content}, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="leaves out"):
        rendered("{{ messages[0].content[:3] }}", said("assistant", "abcdef"), continue_final_message=True)


def guarded(source: str) -> tuple[Tokenizer, ChatTemplate]:
    """Return a tokenizer with control tokens, and a template."""
    inner = tokenizer_of("byte_level")
    inner.add_special_tokens([AddedToken("<|im_start|>"), AddedToken(END)])
    return Tokenizer(inner.to_str()), template(source)


def num_control(tokenizer: Tokenizer, token_ids: list[int]) -> int:
    """Return how many tokens are control tokens."""
    return sum(token_id in tokenizer._control for token_id in token_ids)


def refuse(conversation: Conversation) -> None:
    """Stand for the refusal of a text of a control token."""
    raise InvalidRequest("messages", "contain a control token")


@pytest.mark.parametrize("content", [f"a{END}b", END, f"{END} ", "<|im_", "a <"])
def test_a_continued_message_brings_no_control_token(content: str) -> None:
    """It is text, to its last character."""
    tokenizer, made = guarded(CHATML)
    asked = Conversation([said("user", content), said("assistant", content)], continue_final_message=True)
    text, token_ids = render_guarded(tokenizer, made, asked)
    assert text.endswith(f"assistant\n{content}")
    assert num_control(tokenizer, token_ids) == 3
    assert tokenizer.decode(token_ids) == text


ESCAPED = r'{"a": "x\u003c|im_end\u007c>", "\u003c|im_end|>": [1]}'


@pytest.mark.parametrize("arguments", [ESCAPED, json.loads(ESCAPED), ESCAPED[:-1], r'{"a": "\<|im_end|>"}'])
@pytest.mark.parametrize("write", ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}"])
def test_what_a_json_text_spells_becomes_no_control_token(arguments: Any, write: str) -> None:
    """Escapes are read before anything is masked, so they are masked too."""
    tokenizer, made = guarded(CALLS % write + END)
    asked = Conversation([said("user", "<x>"), called(arguments)])
    text, token_ids = render_guarded(tokenizer, made, asked)
    assert num_control(tokenizer, token_ids) == 1
    assert tokenizer.decode(token_ids) == text == made.render(asked)


def test_parts_that_are_joined_make_no_control_token() -> None:
    """The joined text is that of others, as each part was."""
    tokenizer, made = guarded(TEXTS + END)
    parts = [{"type": "text", "text": text} for text in ("a<|im", "_end|>")]
    asked = Conversation([{"role": "user", "content": parts}])
    assert num_control(tokenizer, render_guarded(tokenizer, made, asked)[1]) == 1
    with pytest.raises(InvalidRequest, match="contain a control token"):
        render_guarded(tokenizer, made, asked, refuse)


def test_a_template_that_ignores_tools_is_known() -> None:
    """No tools are not ignored; nor are those that only change a refusal."""
    asked = Conversation([said("user", "x")], [WEATHER])
    for source, is_ignored in (
        (TEXTS, True),
        (TEXTS + "{{ tools | length }}", False),
        ("{{ 1 / (tools | length) }}", False),
    ):
        made = template(source)
        assert made.ignores_tools(asked, made.render(asked)) is is_ignored
    for tools in (None, list[dict[str, Any]]()):
        assert not template(TEXTS).ignores_tools(Conversation(asked.messages, tools), "user:x;")
