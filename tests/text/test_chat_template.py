"""Chat templates render to the bytes that transformers gives, refuse what they refuse, and never run for long."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.errors import InvalidRequest, ModelError
from ferrule_server.text.chat_template import ChatTemplate, Conversation
from ferrule_server.text.template_process import RenderLimits
from ferrule_server.text.tokenizer import Tokenizer
from ferrule_server.text.tokenizer_config import TokenizerConfig
from tests.text.conversations import CLOCK, CONVERSATIONS, WEATHER, said
from tests.text.vocabularies import SHIPPED

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
NAMES = [path.stem for path in TEMPLATES]
TOKENS = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}
TOOLS: list[list[dict[str, Any]] | None] = [None, [], [WEATHER], [WEATHER, CLOCK]]
NAMED = {"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}
FILES = {"chat_template_jinja": "file", "additional_chat_templates__tool_use_jinja": "more"}
MAP = '{"bos_token": {"content": "<b>"}, "pad_token": "<p>"}'
ALL_TOKENS = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ image_token }}"
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "date_string": "1 Jan 2030"},
    {"enable_thinking": True, "tools_in_user_message": False, "thinking_budget": 12.5, "bos_token": "<bos>"},
]


def write_model(folder: Path, config: dict[str, Any], **files: str) -> Path:
    """Fill a folder with the shipped tokenizer, a tokenizer_config.json and other files."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SHIPPED / "tokenizer.json", folder)
    base = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps({**base, **config}), encoding="utf-8")
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


def theirs(folder: Path) -> Callable[[Conversation], str]:
    """Return what renders a conversation with transformers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))

    def render(conversation: Conversation) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(conversation.messages),
                tools=None if conversation.tools is None else list(conversation.tools),
                add_generation_prompt=conversation.add_generation_prompt,
                tokenize=False,
                **conversation.variables,
            )
        )

    return render


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[ChatTemplate, Callable[[Conversation], str]]]:
    """Return a template by its name twice: as it is here, and as transformers has it."""

    @functools.cache
    def load(name: str) -> tuple[ChatTemplate, Callable[[Conversation], str]]:
        source = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        folder = write_model(tmp_path_factory.mktemp(name), {"chat_template": source})
        ours = ChatTemplate.load(folder)
        assert ours is not None
        return ours, theirs(folder)

    return load


def outcome(render: Callable[[Conversation], str], conversation: Conversation) -> str | None:
    """Return the text, or None where the conversation is refused."""
    try:
        return render(conversation)
    except Exception:  # noqa: BLE001 - a template may fail in any way, there as here
        return None


@pytest.mark.parametrize("name", NAMES)
def test_conversations_render_to_the_same_bytes(name: str, both: Any) -> None:
    """Every conversation with every set of tools and variables, with and without the header of an answer."""
    ours, reference = both(name)
    num_rendered = 0
    for messages in CONVERSATIONS.values():
        for tools in TOOLS:
            for variables in VARIABLES:
                for prompts in (True, False):
                    conversation = Conversation(messages, tools, prompts, variables)
                    expected = outcome(reference, conversation)
                    assert outcome(ours.render, conversation) == expected
                    num_rendered += expected is not None
    assert num_rendered > 40


CONTENT = st.text(max_size=20) | st.sampled_from(
    ["<think>\na\n</think>\n\nb", " x\n", "STOP", "<tool_response></tool_response>"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
EXTRA = st.fixed_dictionaries(
    {},
    optional={
        "reasoning_content": st.none() | CONTENT,
        "thinking": CONTENT,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {"function": st.fixed_dictionaries({"name": st.text(max_size=5), "arguments": JSON})},
                optional={"id": st.just("abcdefghi")},
            ),
            max_size=2,
        ),
    },
)
MESSAGE = st.builds(
    lambda role, content, extra: {"role": role, "content": content, **extra},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    CONTENT,
    EXTRA,
)


@pytest.mark.parametrize("name", NAMES)
@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=5),
    variables=st.dictionaries(st.sampled_from(["enable_thinking", "thinking_budget", "date_string"]), JSON),
)
@settings(max_examples=50)
def test_any_conversation_renders_to_the_same_bytes(
    name: str, both: Any, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    """Or is refused by both."""
    ours, reference = both(name)
    conversation = Conversation(messages, variables=variables)
    assert outcome(ours.render, conversation) == outcome(reference, conversation)


def test_token_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """Special tokens in the text are parsed, none are added."""
    from transformers import AutoTokenizer

    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    folder = write_model(tmp_path, {"chat_template": source, "eos_token": "<|endoftext|>"})
    messages = CONVERSATIONS["several turns"]
    template, tokenizer = ChatTemplate.load(folder), Tokenizer.load(folder)
    assert template is not None
    assert tokenizer is not None
    token_ids = tokenizer.encode(template.render(Conversation(messages)))
    expected = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(messages, return_dict=False)
    assert token_ids == expected
    assert token_ids.count(0) == len(messages)


@pytest.mark.parametrize(
    ("config", "files", "tools", "expected"),
    [
        ({"chat_template": "config"}, {}, None, "config"),
        ({"chat_template": "config"}, {"chat_template_jinja": "file"}, None, "file"),
        ({}, {"chat_template_jinja": "file\n"}, None, "file"),
        (NAMED, {}, None, "plain"),
        (NAMED, {}, [WEATHER], "tools"),
        (NAMED, {}, [], "tools"),
        ({"chat_template": "config"}, FILES, [CLOCK], "more"),
        ({"chat_template": ALL_TOKENS, "image_token": "<i>"}, {}, None, "<s></s><i>"),
        ({"chat_template": "{{ bos_token }}{{ pad_token }}"}, {"special_tokens_map_json": MAP}, None, "<b><p>"),
        ({"chat_template": ALL_TOKENS, "added_tokens_decoder": {}}, {"special_tokens_map_json": MAP}, None, "<s></s>"),
        ({"chat_template": "{{ bos_token }}|", "bos_token": None}, {}, None, "|"),
        ({"chat_template": "{{ boi_token }}", "extra_special_tokens": {"boi_token": "<boi>"}}, {}, None, "<boi>"),
    ],
)  # fmt: skip
def test_files_are_found_as_transformers_finds_them(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], tools: list[dict[str, Any]] | None, expected: str
) -> None:
    """Which template is used, and which special tokens it sees."""
    folder = write_model(tmp_path, config, **files)
    ours, conversation = ChatTemplate.load(folder), Conversation([said("user", "x")], tools)
    assert ours is not None
    assert ours.render(conversation) == expected
    assert theirs(folder)(conversation) == expected


def test_a_folder_without_a_template_loads_none(tmp_path: Path) -> None:
    """With or without a configuration."""
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write_model(tmp_path, {})) is None
    assert TokenizerConfig.load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"chat_template": "a\\n{% if %}"}', r"'default', line 2"),
        ('{"chat_template": 7}', "neither a text nor a list"),
        ('{"chat_template": [{"name": "x"}]}', "neither a text nor a list"),
        ('{"chat_template": [{"name": "x", "template": "y"}]}', r"\['x'\] have no 'default'"),
        ("[]", "does not hold a JSON object"),
        ("{", "cannot be read"),
        ('{"chat_template": "{{ ' + "1" * 5000 + ' }}"}', "'default'"),
    ],
)
def test_a_template_that_cannot_be_used_ends_the_start(tmp_path: Path, content: str, message: str) -> None:
    """The error names the file or the template."""
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        ChatTemplate.load(tmp_path)


def template(source: str, **limits: Any) -> ChatTemplate:
    """Return one template."""
    return ChatTemplate(TokenizerConfig(chat_templates={"default": source}), RenderLimits(**limits))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no ' + messages[0].content) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].missing.more }}",
        "{{ messages[0] + 1 }}",
        "{{ undefined_function() }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ range(10000000) | list }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ ('%' ~ 's') | format }}",
        "{{ ('x' * 10 ** 9) | length }}",
        "{{ (10 ** 9 * messages) | length }}",
        "{{ (9 ** 999999) % 10 }}",
        "{{ lipsum(n=1000000000) }}",
    ],
)
def test_an_error_of_the_template_is_the_callers(source: str) -> None:
    """Whatever goes wrong in it, the sandbox's refusals included, is told in one line."""
    with pytest.raises(InvalidRequest, match="the chat template refuses them") as raised:
        template(source).render(Conversation([said("user", "x" * 5000)]))
    assert raised.value.metadata["field"] == "messages"
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 700


def test_arithmetic_of_a_template_is_that_of_python() -> None:
    """Below the limits."""
    source = "{{ 'ab' * 3 }}{{ 2 * [1] }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}{{ 3 * true }}{{ 'x' * -1 }}"
    assert template(source).render(Conversation([said("user", "x")])) == "ababab[1, 1]10240.53.03"


def test_a_template_that_writes_too_much_is_stopped() -> None:
    """Before it has written it all."""
    conversation = Conversation([said("user", "abc" * 1000)] * 100)
    source = "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="makes more than 50000 characters"):
        template(source, max_length=50_000).render(conversation)
    assert len(template("{{ messages[0].content }}", max_length=3000).render(conversation)) == 3000


def test_half_a_surrogate_pair_is_the_callers_mistake() -> None:
    """JSON can spell it, UTF-8 cannot."""
    with pytest.raises(InvalidRequest, match="surrogate"):
        template("{{ messages[0].x }}").render(Conversation([said("user", x="\ud800")]))


def test_the_messages_given_are_not_changed() -> None:
    """A template sees copies, and the sandbox keeps it from changing them."""
    message = said("assistant", reasoning="why", name=None)
    before = dict(message)
    assert template("{{ messages[0].thinking }}").render(Conversation([message])) == "why"
    assert message == before
