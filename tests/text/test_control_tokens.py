"""Which tokens are control tokens, and that the text of others never becomes one."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from ferrule_server.text.chat_template import ChatTemplate
from ferrule_server.text.tokenizer import Tokenizer
from tests.text.chat_models import CHAT_MODELS, CHATML, KINDS, LOSSLESS, fragments, loaded, tokenizer_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models of this file."""
    return tmp_path_factory.mktemp("models")


def controls(tokenizer: Tokenizer) -> set[str]:
    """Return the texts of the control tokens of a tokenizer."""
    return {token.content for token in tokenizer._control.values()}


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_control_tokens_are_special_ones_and_what_the_template_writes_around_messages(name: str, folder: Path) -> None:
    """Not thoughts and tools, newlines, or words."""
    tokenizer, _ = loaded(name, "byte_level", folder)
    assert controls(tokenizer) == CHAT_MODELS[name].control


def test_every_file_of_the_model_may_name_a_control_token(tmp_path: Path) -> None:
    """By text or id, one or several; a stop token that is no added token is an ordinary word."""
    inner = tokenizer_of("byte_level")
    first = inner.get_vocab_size()
    inner.add_tokens([f"<{i}>" for i in range(8)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<0>", "pad_token": {"content": "<1>"}}))
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": [first + 2, True, "x"], "text_config": {"bos_token_id": first + 3}})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [first + 4, first - 1, 10**12]}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert controls(tokenizer) == {"<0>", "<1>", "<2>", "<3>", "<4>"}


def test_the_start_says_how_many_there_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one line, the names of those that are not marked special in another, for debugging."""
    caplog.set_level(logging.DEBUG, "ferrule_server.text.tokenizer")
    loaded("dolphin, yi", "byte_level", tmp_path)
    assert caplog.messages == [
        "event=control_tokens num=4 num_not_special=2 num_renderings=1",
        "event=control_tokens not_special=<|im_start|>,<|im_end|>",
    ]


def test_a_template_that_accepts_no_conversation_names_no_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so."""
    caplog.set_level(logging.INFO, "ferrule_server.text.tokenizer")
    inner = tokenizer_of("byte_level")
    inner.add_tokens(["<|im_start|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('never') }}" + CHATML)
    tokenizer = Tokenizer.load(tmp_path, ChatTemplate.load(tmp_path))
    assert tokenizer is not None
    assert caplog.messages == ["event=control_tokens num=0 num_not_special=0 num_renderings=0"]


@pytest.mark.parametrize(
    ("name", "end"),
    [("dolphin, yi", "<|im_end|>"), ("gemma", "<end_of_turn>"), ("llama 3", "<|eot_id|>"), ("mistral", "</s>")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_template_writes_after_an_answer_is_known(name: str, end: str, kind: str, folder: Path) -> None:
    """The control token that follows it, without what else comes, such as a new line."""
    tokenizer, _ = loaded(name, kind, folder)
    assert tokenizer.decode(tokenizer.answer_end) == end


@pytest.mark.parametrize(
    ("written", "end"),
    [
        (" \n{end}\n", "<end>"),
        ("{end}{stop}", "<end>"),
        ("{end}\n{{% if loop.last %}}{stop}{{% endif %}}", "<end>"),
        ("", ""),
        ("\n\n", ""),
        (".{end}", ""),
        ("</think>{end}", ""),
        ("{{% if loop.last %}}{stop}{{% else %}}{end}{{% endif %}}", "<stop>"),
    ],
)
def test_only_a_control_token_ends_an_answer(written: str, end: str, tmp_path: Path) -> None:
    """Directly after it, spaces aside, at the end of the conversation; no word, and no token that anybody may write."""
    inner = tokenizer_of("byte_level")
    inner.add_tokens(["<end>", "<stop>", "<user>", "<think>", "</think>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    after = written.format(end="<end>", stop="<stop>")
    source = "{% for m in messages %}<user>{{ m.content }}" + after + "{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.load(tmp_path, ChatTemplate.load(tmp_path))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.answer_end) == end


def test_a_template_without_answers_ends_none(tmp_path: Path) -> None:
    """One that refuses them, and one that leaves them out."""
    for number, kept in enumerate(("{{ raise_exception('no') if m.role == 'assistant' }}", "{{ 1 }}")):
        inner = tokenizer_of("byte_level")
        inner.add_tokens(["<end>"])
        inner.save(str(tmp_path / "tokenizer.json"))
        is_shown = "" if number == 0 else " if m.role == 'user'"
        source = "{% for m in messages" + is_shown + " %}" + kept + "{{ m.content }}<end>{% endfor %}"
        (tmp_path / "chat_template.jinja").write_text(source)
        tokenizer = Tokenizer.load(tmp_path, ChatTemplate.load(tmp_path))
        assert tokenizer is not None
        assert tokenizer.answer_end == ()


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(("dolphin, yi", "deepseek", "mistral")), kind=st.sampled_from(KINDS))
def test_literal_text_never_has_a_control_token(data: st.DataObject, name: str, kind: str, folder: Path) -> None:
    """Whatever pieces it is made of, also if the vocabulary has such a word; it reads as without these tokens."""
    tokenizer, _ = loaded(name, kind, folder)
    without = tokenizer_of(kind)
    without.add_tokens([AddedToken(text, normalized=False) for text in CHAT_MODELS[name].others])
    text = data.draw(fragments(name))
    token_ids = tokenizer.encode(text, parse_special_tokens=False)
    assert not {*token_ids} & tokenizer._control.keys()
    assert tokenizer.decode(token_ids) == Tokenizer(without.to_str()).decode(without.encode(text).ids)
    assert kind not in LOSSLESS or tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_other_added_tokens_are_still_tokens(kind: str, folder: Path) -> None:
    """With the ids that they always have: thoughts may be written by anybody."""
    tokenizer, _ = loaded("deepseek", kind, folder)
    (thought,) = {*tokenizer.encode("a<think>")} - {*tokenizer.encode("a")}
    literal = tokenizer.encode("</s><think><\uff5cUser\uff5c>", parse_special_tokens=False)
    assert thought in literal
    assert tokenizer.encode("x", add_special_tokens=True, parse_special_tokens=False) == tokenizer.encode("x", True)


@pytest.mark.parametrize(
    "flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}, {"special": True}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_a_token_do_not_matter(kind: str, flags: dict[str, bool]) -> None:
    """Its text is plain text."""
    inner = tokenizer_of(kind)
    inner.add_tokens([AddedToken("<|end|>", **flags)])
    tokenizer = Tokenizer(inner.to_str(), "<|end|>")
    for text in ("<|end|>", " <|end|> ", "a <|end|> b", "a<|end|>b"):
        assert tokenizer.eos_id not in tokenizer.encode(text, parse_special_tokens=False)


@pytest.mark.parametrize("kind", ["unigram", "llama"])
def test_an_end_that_is_only_a_word_of_the_vocabulary_is_a_control_token(kind: str) -> None:
    """If it is a sign: text never becomes it, and the template may write it."""
    inner = tokenizer_of(kind)
    tokenizer = Tokenizer(inner.to_str(), "</s>", [inner.token_to_id("m") or 0, "a"])
    assert controls(tokenizer) == {"</s>"}
    assert tokenizer.eos_id in tokenizer.encode("a</s>")
    assert tokenizer.eos_id not in (literal := tokenizer.encode("a</s> im", parse_special_tokens=False))
    assert tokenizer.decode(literal) == "a</s> im"
    assert tokenizer.encode("im a", parse_special_tokens=False) == tokenizer.encode("im a")
    assert tokenizer.find_control_token("a</s>") == "</s>"


@pytest.mark.parametrize("special", [True, False])
def test_control_tokens_are_skipped_by_their_ids(special: bool) -> None:
    """Also one that a changing normaliser spells in another way, in a whole text and in a stream alike."""
    inner = tokenizer_of("byte_level")
    inner.normalizer = normalizers.Lowercase()
    inner.add_tokens([AddedToken("<|END|>", normalized=True, special=special)])
    tokenizer = Tokenizer(inner.to_str(), "<|END|>")
    assert tokenizer.eos_id is not None
    token_ids = [*tokenizer.encode("a"), tokenizer.eos_id]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "a"
    assert list(tokenizer.shown(token_ids, True)) == token_ids[:1]
