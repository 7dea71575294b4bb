"""Conversations in which the text of control tokens stays text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from ferrule_server.errors import InvalidRequest
from ferrule_server.text.chat_template import ChatTemplate, Conversation
from ferrule_server.text.stand_ins import render_as_text
from ferrule_server.text.tokenizer import Tokenizer
from ferrule_server.text.tokenizer_config import TokenizerConfig
from tests.text.chat_models import CHATML, KINDS, LOSSLESS, fragments, loaded, tokenizer_of
from tests.text.conversations import said

END = "<|im_end|>"
MODELS = ("dolphin, yi", "deepseek", "llama 3", "mistral", "glm", "gemma")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models of this file."""
    return tmp_path_factory.mktemp("models")


def control_ids(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    """Return the control tokens among tokens, in order."""
    return [token_id for token_id in token_ids if token_id in tokenizer._control]


def in_turns(*contents: str) -> Conversation:
    """Return a conversation of user and assistant."""
    return Conversation([said(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)])


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(MODELS), kind=st.sampled_from(KINDS))
def test_all_control_tokens_are_those_of_the_template(data: st.DataObject, name: str, kind: str, folder: Path) -> None:
    """The same as around harmless words, whatever the contents are; the tokens read as the text, which is unchanged."""
    tokenizer, template = loaded(name, kind, folder)
    contents = [data.draw(fragments(name)) for _ in range(3)]
    text, token_ids = render_as_text(tokenizer, template, in_turns(*contents))
    assert text == template.render(in_turns(*contents))
    harmless = tokenizer.encode(template.render(in_turns("x", "x", "x")))
    assert control_ids(tokenizer, token_ids) == control_ids(tokenizer, harmless)
    assert kind not in LOSSLESS or tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_without_such_text_has_the_usual_tokens(kind: str, folder: Path) -> None:
    """And one with such text has the usual tokens everywhere else: no piece begins with a space of its own."""
    tokenizer, template = loaded("dolphin, yi", kind, folder)
    plain = in_turns("a <b", "c <", "d")
    assert render_as_text(tokenizer, template, plain)[1] == tokenizer.encode(template.render(plain))
    token_ids = render_as_text(tokenizer, template, in_turns(f"a{END}b"))[1]
    usual = tokenizer.encode(template.render(in_turns("a#b")))
    border = usual.index(tokenizer.encode("x#x")[-2])
    (parted,) = (token_ids[border : len(token_ids) - (len(usual) - border - 1)],)
    assert token_ids == [*usual[:border], *parted, *usual[border + 1 :]]
    assert tokenizer.decode(tokenizer.encode("x") + parted).endswith(END)


def made(source: str, *tokens: AddedToken | str, **config: Any) -> tuple[Tokenizer, ChatTemplate]:
    """Return a byte-level tokenizer with special tokens, and a template."""
    inner = tokenizer_of("byte_level")
    inner.normalizer = config.get("normalizer")
    inner.add_special_tokens(list(tokens or ("<|im_start|>", END)))
    template = ChatTemplate(TokenizerConfig(chat_templates={"default": source}))
    return Tokenizer(inner.to_str()), template


@pytest.mark.parametrize(
    "content",
    [
        "<|im_<|im_end|>end|>",
        "<|im_end|><|im_end|>",
        "<|im_<|im_<|im_end|>end|>end|>",
        "<|im_end|><|im_",
        "<|im_e",
        '"\\<|im_end|>\n\u2603',
    ],
)
def test_nothing_that_is_put_together_becomes_a_token(content: str) -> None:
    """Pieces that others enclose, and pieces that the template or the next string would complete."""
    source = "{% for m in messages %}{{ m.content }}im_end|>{{ m.content }}nd|>{{ [m.content] | tojson }}{% endfor %}"
    text, token_ids = render_as_text(*(of := made(source)), in_turns(content, "nd|>"))
    assert control_ids(of[0], token_ids) == []
    assert of[0].decode(token_ids) == text


def test_parts_of_a_content_do_not_become_a_token_together() -> None:
    """A template writes them one after the other."""
    source = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}<|im_end|>"
    tokenizer, template = made(source)
    parts = [{"type": "text", "text": text} for text in ("a<|im", "_", "end|>b")]
    text, token_ids = render_as_text(tokenizer, template, Conversation([{"role": "user", "content": parts}]))
    assert text == "a<|im_end|>b<|im_end|>"
    assert len(control_ids(tokenizer, token_ids)) == 1


def test_every_string_is_plain_text() -> None:
    """Roles, keys, tools and variables."""
    source = "{{ messages | tojson }}{{ tools | tojson }}{{ more | tojson }}<|im_end|>"
    tokenizer, template = made(source)
    deep: Any = END
    for _ in range(300):
        deep = [deep]
    messages = [{"role": END, "content": END, END: [{END: [END, 1, None, True]}]}]
    text, token_ids = render_as_text(tokenizer, template, Conversation(messages, [{"a": END}], True, {"more": deep}))
    assert json.loads(text[: text.index("][{") + 1]) == messages
    assert len(control_ids(tokenizer, token_ids)) == 1
    assert tokenizer.decode(token_ids) == text


def test_text_that_the_template_leaves_out_does_no_harm(folder: Path) -> None:
    """Such as the thoughts of earlier turns."""
    tokenizer, template = loaded("deepseek", "byte_level", folder)
    text, token_ids = render_as_text(tokenizer, template, in_turns("x", "hm </s></think>y", "z"))
    assert "hm" not in text
    assert token_ids == tokenizer.encode(text)


@pytest.mark.parametrize(
    "change", ["upper", "title", "truncate(9, true, '', 0)", "length", "replace('|', '')", "reverse", "urlencode"]
)
def test_a_template_that_does_not_keep_the_text_refuses_it(change: str) -> None:
    """What would come of it is not known; text without control tokens may be changed."""
    tokenizer, template = made(f"{{{{ messages[0].content | {change} }}}}<|im_end|>")
    with pytest.raises(InvalidRequest, match=re.escape(f"control token {END}")) as raised:
        render_as_text(tokenizer, template, in_turns(f"abc {END} def"))
    assert raised.value.metadata == {"field": "messages", "special_token": END}
    assert len(control_ids(tokenizer, render_as_text(tokenizer, template, in_turns("abc"))[1])) == 1


def test_another_spelling_that_is_normalized_to_a_token_is_refused() -> None:
    """Its place in the text is not known."""
    token = AddedToken("<|end|>", normalized=True)
    tokenizer, template = made(CHATML, token, normalizer=normalizers.Lowercase())
    with pytest.raises(InvalidRequest, match="spelling"):
        render_as_text(tokenizer, template, in_turns("a <|END|>"))
    assert control_ids(tokenizer, render_as_text(tokenizer, template, in_turns("a <|end|>"))[1]) == []


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
def test_spaces_beside_a_token_of_the_template_are_the_usual_ones(flags: dict[str, bool]) -> None:
    """A token may swallow them."""
    tokenizer, template = made("{{ messages[0].content }} <|end|> \n x <|end|>", AddedToken("<|end|>", **flags))
    token_ids = render_as_text(tokenizer, template, in_turns("a<|end|>"))[1]
    usual = tokenizer.encode(template.render(in_turns("a#")))
    assert token_ids[-len(usual) + 2 :] == usual[2:]


def test_a_token_of_the_template_is_never_lost_in_silence() -> None:
    """If its neighbour decides whether it is a token, the conversation is refused."""
    tokenizer, template = made("a<|end|>{{ messages[0].content }} <|end|>", AddedToken("<|end|>", single_word=True))
    with pytest.raises(InvalidRequest, match="lost"):
        render_as_text(tokenizer, template, in_turns("b<|end|>"))
