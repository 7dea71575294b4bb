"""The tokenizers of GGUF files, with small vocabularies made here; pieces are those that llama.cpp makes."""

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tokenizers

from ferrule_server.errors import ModelError
from ferrule_server.model.gguf.pre_tokenizers import RULES
from ferrule_server.model.gguf.token_list import TokenList
from ferrule_server.model.gguf.vocabulary import stop_ids, tokenizer_config, tokenizer_json
from ferrule_server.text.tokenizer import Tokenizer
from ferrule_server.text.tokenizer_config import _configured_templates
from tests.model.gguf.pieces import ORIGINAL, PIECES, TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()
BYTES = [f"<0x{i:02X}>" for i in range(256)]
Metadata = dict[str, Any]


def metadata(tokens: Mapping[str, int], entries: Mapping[str, object]) -> Metadata:
    """Return the metadata of a file with these tokens, by text and type; None leaves an entry out."""
    types = np.array([*tokens.values()], np.int32)
    all_entries = {"tokens": [*tokens], "token_type": types, **entries}
    return {f"tokenizer.ggml.{key}": value for key, value in all_entries.items() if value is not None}


def byte_level(*merges: str, types: Mapping[str, int] | None = None, **entries: object) -> Metadata:
    """Return the metadata of a byte-level file: 256 bytes, what the merges make, and other tokens by their types."""
    merges = merges or ("a a",)
    tokens = dict.fromkeys([*sorted(ALPHABET), *(merge.replace(" ", "") for merge in merges)], NORMAL)
    return metadata(tokens | dict(types or {}), {"model": "gpt2", "pre": "gpt-2", "merges": [*merges], **entries})


def scored(*words: str, **entries: object) -> Metadata:
    """Return the metadata of a SentencePiece file: control tokens, bytes, and words, the best first."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(BYTES, BYTE)}
    tokens |= dict.fromkeys([*words, *sorted({*"".join(words)})], NORMAL)
    scores = -np.arange(len(tokens), dtype=np.float32)
    return metadata(tokens, {"model": "llama", "scores": scores, **entries})


def loaded(described: Metadata) -> Tokenizer:
    """Return the tokenizer of a file."""
    eos = tokenizer_config(described).get("eos_token")
    return Tokenizer(json.dumps(tokenizer_json(described)), eos, stop_ids(described))


def spelled(described: Metadata, text: str, **options: bool) -> list[str]:
    """Return the tokens of a text, as the file spells them."""
    return [described["tokenizer.ggml.tokens"][i] for i in loaded(described).encode(text, **options)]


def splitter(name: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Return what splits a text by a rule."""
    described = tokenizer_json(byte_level(pre=name, bos_token_id=0))
    split = tokenizers.Tokenizer.from_str(json.dumps(described)).pre_tokenizer
    assert isinstance(split, tokenizers.pre_tokenizers.PreTokenizer)
    return split


@pytest.mark.parametrize("name", RULES)
def test_pieces_are_those_of_llama_cpp(name: str) -> None:
    """Each rule splits tricky texts as llama.cpp does, or as the original tokenizer does where that differs."""
    (names,) = [names for names in PIECES if name in names.split()]
    for i, text in enumerate(TEXTS):
        pieces = [text[start:end] for _, (start, end) in splitter(name).pre_tokenize_str(text)]
        assert "|".join(pieces) == ORIGINAL.get(names, {}).get(i, PIECES[names][i])


@pytest.mark.parametrize("name", {rule.splits: name for name, rule in RULES.items()}.values())
@pytest.mark.parametrize("run", ["1", " ", "A", "\n"])
def test_long_runs_are_split_in_linear_time(name: str, run: str) -> None:
    """No rule takes time that grows with the square of a text; 50 000 characters then take minutes."""
    pieces = splitter(name).pre_tokenize_str(run * 50_000 + "x")
    assert pieces[-1][1][1] == 50_001


def test_merges_apply_in_their_order() -> None:
    """The first merge of the file that a text allows comes first, then the leftmost; a repeated merge counts once."""
    described = byte_level("b c", "a b", "ab c", "b c")
    assert spelled(described, "abc abc") == ["a", "bc", "Ġ", "a", "bc"]
    assert spelled(byte_level("a b", "b c", "ab c"), "abc") == ["abc"]


@pytest.mark.parametrize(("rule", "tokens"), [("llama-bpe", ["abc"]), ("gpt-2", ["ab", "c"])])
def test_a_piece_that_is_a_token_may_ignore_merges(rule: str, tokens: list[str]) -> None:
    """Llama 3 has tokens that no merge makes."""
    assert spelled(byte_level("a b", types={"abc": NORMAL}, pre=rule, add_bos_token=False), "abc") == tokens


@pytest.mark.parametrize(
    ("described", "begins"),
    [
        (byte_level(bos_token_id=0), False),
        (byte_level(bos_token_id=0, add_bos_token=True), True),
        (byte_level(bos_token_id=0, pre="llama-bpe"), True),
        (byte_level(bos_token_id=0, pre="llama-bpe", add_bos_token=False), False),
        (scored("a"), True),
        (scored("a", add_bos_token=False), False),
        (scored("aa", model="gemma4", merges=["a a"], bos_token_id=1, add_bos_token=False), True),
    ],
)
def test_whether_a_begin_token_is_added(described: Metadata, begins: bool) -> None:
    """A file that does not say gets what its kind, or its rule, implies."""
    tokenizer = loaded(described)
    begin = tokenizer_config(described)["bos_token"]
    assert len(tokenizer.begin_ids) == begins
    assert spelled(described, "a", add_special_tokens=True)[:begins] == [begin] * begins


def test_an_end_token_is_added_on_request() -> None:
    """Few models have it."""
    assert spelled(scored("a", add_eos_token=True), "a", add_special_tokens=True)[-1] == "</s>"
    assert spelled(scored("a"), "a", add_special_tokens=True)[-1] == "a"


def test_tokens_of_users_are_found_first_and_longest_first() -> None:
    """They are written raw, also in a byte-level vocabulary, and are no control tokens."""
    described = byte_level("a b", types=dict.fromkeys(["  ", "    ", "é", "ab!"], USER_DEFINED))
    expected = ["    ", "  ", "Ġ", "ab", "é", "ab!"]
    for parses in (True, False):
        assert spelled(described, "       abéab!", parse_special_tokens=parses) == expected
    tokenizer = loaded(described)
    assert tokenizer.decode(tokenizer.encode("       abab!"), skip_special_tokens=True) == "       abab!"


@pytest.mark.parametrize("kind", [CONTROL, UNKNOWN, NORMAL])
@pytest.mark.parametrize("token", ["<|im_end|>", "<|start_header_id|>", "<end_of_turn>", "<\uff5cUser\uff5c>"])
def test_control_tokens_are_known_by_type_or_text(kind: int, token: str) -> None:
    """Some converters give them the type of words."""
    described = byte_level(types={token: kind})
    assert spelled(described, f"a{token}") == ["a", token]
    assert token not in spelled(described, f"a{token}", parse_special_tokens=False)
    tokenizer = loaded(described)
    assert tokenizer.decode(tokenizer.encode(f"a{token}"), skip_special_tokens=True) == "a"


def test_control_tokens_of_phi_3_swallow_spaces() -> None:
    """As in the original tokenizer, which a GGUF file does not say."""
    described = byte_level(types={"<|end|>": CONTROL, "<|endoftext|>": CONTROL})
    text = "<|end|>\n a<|endoftext|> a"
    assert spelled(described, text) == ["<|end|>", "Ċ", "Ġ", "a", "<|endoftext|>", "Ġ", "a"]
    described["general.name"] = "Phi-3 mini"
    assert spelled(described, text) == ["<|end|>", "a", "<|endoftext|>", "Ġ", "a"]


def test_the_best_score_is_merged_first() -> None:
    """Scores decide, and not the order of the tokens or their length."""
    described = scored("bc", "ab", "cd", add_space_prefix=False)
    assert spelled(described, "abcd") == ["a", "bc", "d"]
    described["tokenizer.ggml.scores"] = described["tokenizer.ggml.scores"][::-1].copy()
    assert spelled(described, "abcd") == ["ab", "cd"]


def test_runs_of_spaces_with_equal_scores_are_taken_from_the_left() -> None:
    """Llama 2 has tokens of 1 to 16 spaces with the same score."""
    runs = ["\u2581" * length for length in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15)]
    described = scored(*runs, add_space_prefix=False)
    described["tokenizer.ggml.scores"] = np.full(len(described["tokenizer.ggml.tokens"]), -1e9, np.float32)
    assert [len(run) for run in spelled(described, " " * 39)] == [16, 16, 7]
    assert [len(run) for run in spelled(described, " " * 33)] == [16, 16, 1]


@pytest.mark.parametrize(
    ("has_prefix", "tokens"), [(True, ["\u2581a", "b"]), (None, ["\u2581a", "b"]), (False, ["a", "b"])]
)
def test_a_space_is_put_before_a_text(has_prefix: bool | None, tokens: list[str]) -> None:
    """Unless the file says otherwise; it is gone from the decoded text."""
    described = scored("\u2581a", "b", add_space_prefix=has_prefix)
    assert spelled(described, "ab") == tokens
    tokenizer = loaded(described)
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert tokenizer.decode(tokenizer.encode(" a b")) == " a b"


def test_characters_that_are_not_tokens_become_bytes() -> None:
    """In a SentencePiece vocabulary."""
    assert spelled(scored("a", add_space_prefix=False), "a\u00e9\n") == ["a", "<0xC3>", "<0xA9>", "<0x0A>"]


def test_a_text_never_merges_to_a_control_token() -> None:
    """llama.cpp merges ``<``, ``s`` and ``>`` to ``<s>`` if the parts are tokens, even where it should not parse it."""
    described = scored("<s", "s>", "0x", "x4", add_space_prefix=False)
    assert spelled(described, "<s>", parse_special_tokens=False) == ["<s", ">"]
    assert spelled(described, "<s>") == ["<s>"]
    assert "<0x41>" not in spelled(scored("<0x", "<0x4", "<0x41", "1>", add_space_prefix=False), "<0x41>")


def test_gemma_4_merges_lines_whole() -> None:
    """Spaces are signs, lines are not split at spaces, and newlines are merged among themselves."""
    merges = ["\n\n \n", "\n \n", "a \u2581", "a\u2581 b", "\u2581 \u2581"]
    words = [*("".join(merge.split(" ")) for merge in merges), "b"]
    described = scored(*words, model="gemma4", merges=merges, bos_token_id=1, unknown_token_id=0)
    assert spelled(described, "a b  \n\n\n\n\u00e9") == ["a\u2581b", "\u2581\u2581", "\n\n\n", "\n", "<0xC3>", "<0xA9>"]
    tokenizer = loaded(described)
    assert tokenizer.decode(tokenizer.encode(" a b\n")) == " a b\n"


def test_empty_tokens_get_names() -> None:
    """Some files fill their vocabulary with them."""
    described = byte_level()
    described["tokenizer.ggml.tokens"] += ["", ""]
    del described["tokenizer.ggml.token_type"]
    assert loaded(described).vocab_size == 259


def test_a_token_that_is_not_in_the_vocabulary_is_none() -> None:
    """Converters write such numbers for tokens that a model does not have."""
    described = scored("a", padding_token_id=1 << 32, unknown_token_id=260)
    assert tokenizer_config(described).keys() == {"bos_token", "eos_token"}
    assert loaded(described).vocab_size == 260


@pytest.mark.parametrize("token", ["<|" + "a" * 2_000_000 + ">", "<|" + "|" * 2_000_000 + ">", "<|" * 1_000_000])
def test_a_long_token_is_read_in_no_time(token: str) -> None:
    """Whether it is a sign is decided by one look at each character."""
    described = byte_level(tokens=[token, "<|a|>", "<|b\uff5c>", "<\uff5cc\uff5c>"], token_type=[1] * 4)
    begin = time.process_time()
    assert TokenList.read(described).special_ids() == {1, 3}
    assert time.process_time() - begin < 1


def test_special_tokens_and_templates_are_named() -> None:
    """As tokenizer_config.json names them; one template is a text, several are a list."""
    described = scored("a", padding_token_id=np.uint32(2)) | {"tokenizer.chat_template": "{{ 1 }}"}
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    assert tokenizer_config(described) == named | {"chat_template": "{{ 1 }}"}
    described |= {"tokenizer.chat_template.tool_use": "{{ 2 }}", "tokenizer.chat_templates": ["tool_use"]}
    templates = _configured_templates(tokenizer_config(described)["chat_template"])
    assert templates == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert tokenizer_config(byte_level()) == {}


@pytest.mark.parametrize(
    ("described", "stops"),
    [
        (byte_level(), []),
        (byte_level(types={"<|endoftext|>": 3, "<|im_end|>": 3}, eos_token_id=258), ["<|im_end|>", "<|endoftext|>"]),
        (byte_level(types={"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}), ["<|return|>", "<|call|>"]),
        (byte_level(types={"<|end|>": 3, "<|flush|>": 3, "<|calls|>": 3}), ["<|flush|>", "<|calls|>"]),
        (byte_level(types={"<|end|>": 1, "</s>": 1}, eot_token_id=0, eom_token_id=1), ["!", '"', "<|end|>"]),
        (byte_level(types={"</s>": 3}), ["</s>"]),
        (scored("a"), ["</s>"]),
    ],
)
def test_stop_tokens(described: Metadata, stops: list[str]) -> None:
    """By key and by name; a token that only ends a message is none."""
    assert [described["tokenizer.ggml.tokens"][i] for i in stop_ids(described)] == stops


@pytest.mark.parametrize("described", [{}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}])
def test_a_file_without_a_tokenizer(described: Metadata) -> None:
    """Such a model takes and returns token ids only."""
    assert tokenizer_json(described) is None
    assert tokenizer_config(described) == {}
    assert stop_ids(described) == []


REFUSED: dict[str, tuple[Metadata, str]] = {
    "t5": (byte_level(model="t5"), "is of the kind 't5'"),
    "bert": (byte_level(model="bert"), "is of the kind 'bert'"),
    "plamo2": (byte_level(model="plamo2"), "is of the kind 'plamo2'"),
    "kind": (byte_level(model=np.zeros(3)), "is of the kind array"),
    "rule": (byte_level(pre="gpt-17"), "by the rule 'gpt-17'"),
    "rule of an encoder": (byte_level(pre="jina-v2-de"), "by the rule 'jina-v2-de'"),
    "rule that is no text": (byte_level(pre=["gpt-2"]), "by the rule ['gpt-2']"),
    "no rule": (byte_level(pre=None), "does not say how its tokenizer splits"),
    "no tokens": (byte_level(tokens=None), "tokens is not a list of 1 to"),
    "tokens that are a text": (byte_level(tokens="abc"), "tokens is not a list"),
    "token that is no text": (byte_level(tokens=["a", 1], token_type=None), "entry 1 is 1"),
    "token that is not UTF-8": (byte_level(tokens=["a", "b\udcff"], token_type=None), "entry 1 is 'b\\udcff'"),
    "tokens that are bytes": (byte_level(tokens=[b"a", "b"], token_type=None), "entry 0 is b'a'"),
    "same token twice": (byte_level(tokens=["a", "b", "a"], token_type=None), "1 tokens are in the vocabulary more"),
    "too few types": (byte_level(token_type=[1, 1]), "shape (2,), but there are 257 tokens"),
    "types that are no numbers": (byte_level(token_type=["x"] * 257), "entries that are not numbers"),
    "types that are lists": (byte_level(token_type=[[1], [1, 2]]), "entries that are not numbers"),
    "unknown type": (byte_level(token_type=[9] * 257), "not types of tokens (0 to 6)"),
    "fraction of a type": (byte_level(token_type=[1.5] * 257), "not types of tokens"),
    "no merges": (byte_level(merges=None), "merges is not a list"),
    "merge of one": (byte_level(merges=["ab"]), "entry 'ab', which does not make a token"),
    "merge of strangers": (byte_level(merges=["a b"]), "entry 'a b', which does not make a token"),
    "begin token": (byte_level(bos_token_id=257, add_bos_token=True), "bos_token_id names no token, but this token is"),
    "negative begin token": (byte_level(bos_token_id=-1, add_bos_token=True), "bos_token_id names no token"),
    "begin token that is a text": (byte_level(bos_token_id="1", add_bos_token=True), "bos_token_id is '1'"),
    "begin token that is a truth": (byte_level(bos_token_id=True, add_bos_token=True), "bos_token_id is True"),
    "no begin token": (byte_level(add_bos_token=True), "bos_token_id names no token, but this token is to be added"),
    "flag": (byte_level(add_bos_token="yes"), "add_bos_token is 'yes', which is neither"),
    "flag that is an array": (byte_level(add_bos_token=np.ones(257) / 3), "add_bos_token is array([0.33333333"),
    "no scores": (scored("a", scores=None), "has no scores"),
    "too few scores": (scored("a", scores=[0.0]), "scores has the shape (1,)"),
    "score that is no number": (scored("a", scores=[float("nan")] * 260), "scores has entries that are not numbers"),
    "long token": (scored("a" * 513), "up to 513 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """In one line that names the entry and the value."""
    described, message = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        tokenizer_json(described)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id is '2', which is not the id of a token"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template is not a text"),
        ({"tokenizer.chat_template.x": "x" * (5 << 20)}, "tokenizer.chat_template.x is not a text of at most"),
    ],
)
def test_what_is_named_must_exist(changes: Metadata, message: str) -> None:
    """In the part that tokenizer_config.json would state."""
    with pytest.raises(ModelError, match=message):
        tokenizer_config(byte_level() | changes)
