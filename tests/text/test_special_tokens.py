"""The search for the text of special tokens, in what others have written."""

import json
import time

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers

from ferrule_server.text.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")


def made(
    *special: AddedToken | str, plain: tuple[str, ...] = (), normalizer: normalizers.Normalizer | None = None
) -> Tokenizer:
    """Return a tokenizer of single letters with these added tokens."""
    letters = {letter: i for i, letter in enumerate("?abc<>|_")}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(letters, unk_token="?"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(plain))
    return Tokenizer(tokenizer.to_str())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("a <|im_end> |im_end|> <think> </s>", None),
        ("<|im_end|>", "<|im_end|>"),
        ("xx<|im_end|>xx<s>", "<|im_end|>"),
        ("<|im_<|im_start|>end|>", "<|im_start|>"),
        ("日本語🦀<s>", "<s>"),
        ("\ud800<s>", "<s>"),
        ("\ud800", None),
        ("?", None),
    ],
)
def test_the_first_special_token_of_a_text_is_found(text: str, found: str | None) -> None:
    """Anywhere, as a whole; tokens that are not marked special are ordinary text, as is half a surrogate pair."""
    assert made(*SPECIAL, plain=("<think>",)).find_control_token(text) == found


def test_a_tokenizer_without_special_tokens_finds_none() -> None:
    """Whatever else it has."""
    assert made(plain=("<think>",)).find_control_token("<think>?<s>") is None


@pytest.mark.parametrize(
    ("token", "normalizer", "text"),
    [
        (AddedToken("<|end|>", normalized=True), normalizers.Lowercase(), "<|END|>"),
        (AddedToken("<|end|>", normalized=True), normalizers.NFKC(), "\uff1c|end|\uff1e"),
        (
            AddedToken("<s>", normalized=True),
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            "a<s>",
        ),
        (AddedToken("<s>", single_word=True), None, "a<s>a"),
        (AddedToken("?"), None, "a?"),
        (AddedToken("\n"), None, "a\nb"),
    ],
)
def test_what_becomes_a_special_token_is_found(
    token: AddedToken, normalizer: normalizers.Normalizer | None, text: str
) -> None:
    """Also what the normalizer turns into one, and whatever the flags of a token say of its neighbours."""
    tokenizer = made(token, normalizer=normalizer)
    assert tokenizer.control_texts(text)[:1] == [token.content]
    assert tokenizer.find_control_token("abc") is None


def test_other_spellings_of_tokens_that_are_not_normalized_are_text() -> None:
    """The tokenizer itself does not make tokens of them."""
    tokenizer = made(AddedToken("<|end|>", normalized=False), normalizer=normalizers.Lowercase())
    assert tokenizer.find_control_token("<|END|>") is None
    assert tokenizer.find_control_token("<|end|>") == "<|end|>"


@pytest.mark.parametrize("unit", ["<", "<|reserved_", "<|reserved_1", "<|reserved_1|", "x = 1\n"])
def test_the_time_of_a_search_does_not_depend_on_the_text(unit: str) -> None:
    """1 MiB of almost-tokens of a thousand tokens with one beginning takes linear time."""
    tokenizer = made(*(f"<|reserved_{i}|>" for i in range(1000)))
    text = unit * ((1 << 20) // len(unit))
    begin_s = time.process_time()
    assert tokenizer.find_control_token(text) is None
    assert time.process_time() - begin_s < 2


def test_a_hostile_folder_of_special_tokens_is_searched_too() -> None:
    """Very long tokens, and tokens that begin each other."""
    described = json.loads(tokenizers.Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).to_str())
    contents = ["<" * n + ">" for n in range(1, 500)] + ["x" * 100_000]
    described["added_tokens"] = [
        {"id": i + 1, "content": content, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, content in enumerate(contents)
    ]
    tokenizer = Tokenizer(json.dumps(described))
    assert tokenizer.find_control_token("a<<<>") == "<<<>"
    assert tokenizer.find_control_token("x" * 99_999) is None
