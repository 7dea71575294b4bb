"""Tokenizers and chat templates built like those of well-known models, in small and in our own words."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ferrule_server.text.chat_template import ChatTemplate
from ferrule_server.text.tokenizer import Tokenizer
from ferrule_server.text.tokenizer_config import TokenizerConfig

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
    "{% else %}<\uff5cAssistant\uff5c>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<\uff5cAssistant\uff5c><think>\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turns') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
EMPTY_THOUGHTS = CHATML.replace(
    "{{ m.content }}", "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}"
)
HALF_A_THOUGHT = DEEPSEEK.replace("<\uff5cAssistant\uff5c>{{", "<\uff5cAssistant\uff5c></think>{{")
THOUGHTS_IN_PROSE = "<|im_start|>system\nWrite <think> ideas </think> first. /think<|im_end|>\n" + EMPTY_THOUGHTS
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class ChatModel:
    """A model that chats: its added tokens, special and not, its template, and the control tokens it should have."""

    special: tuple[str, ...]
    plain: tuple[str, ...]
    template: str
    control: frozenset[str]
    bos: str = "<s>"
    eos: str = "</s>"

    @property
    def others(self) -> tuple[str, ...]:
        """The added tokens that anybody may write."""
        return tuple(text for text in self.plain if text not in self.control)


def _model(special: tuple[str, ...], plain: tuple[str, ...], template: str, *control: str, **ends: str) -> ChatModel:
    return ChatModel(special, plain, template, frozenset((*special, *control)), **ends)


_ENDS = ("<s>", "</s>")
_THINK = ("<think>", "</think>")
_TURNS = ("<|im_start|>", "<|im_end|>")
_SPEAKERS = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
CHAT_MODELS: dict[str, ChatModel] = {
    "llama 3": _model(("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), (), LLAMA3, eos="<|eot_id|>"),
    "dolphin, yi": _model(_ENDS, (*_TURNS, "<|image|>"), CHATML, *_TURNS, eos="<|im_end|>"),
    "deepseek": _model(_ENDS, (*_SPEAKERS, *_THINK, "<tool>"), DEEPSEEK, *_SPEAKERS),
    "gemma": _model(
        _ENDS, ("<start_of_turn>", "<end_of_turn>", "\n", "\n\n"), GEMMA, "<start_of_turn>", "<end_of_turn>"
    ),
    "qwen 3": _model((*_ENDS, *_TURNS), (*_THINK, "<tool_call>"), CHATML, eos="<|im_end|>"),
    "glm": _model(_ENDS, (*_TURNS, *_THINK), EMPTY_THOUGHTS, *_TURNS),
    "deepseek 3.1": _model(_ENDS, (*_SPEAKERS, *_THINK), HALF_A_THOUGHT, *_SPEAKERS),
    "smollm 3": _model(_ENDS, (*_TURNS, *_THINK), THOUGHTS_IN_PROSE, *_TURNS),
    "mistral": _model(_ENDS, ("[INST]", "[/INST]"), MISTRAL, "[INST]", "[/INST]"),
    "words as tokens": _model(_ENDS, (*_TURNS, "user", "assistant", "###"), CHATML + "###", *_TURNS),
}
KINDS = ("byte_level", "llama", "metaspace_first", "metaspace_always", "unigram")
"""Ways to turn text into tokens. Those of ``LOSSLESS`` give back the text of any conversation in ASCII."""
_LETTERS = [*map(chr, range(128)), "\uff5c"]
LOSSLESS = ("byte_level", "unigram")


def fragments(name: str) -> st.SearchStrategy[str]:
    """Texts of the added tokens of a model, of their halves, and of little else."""
    model = CHAT_MODELS[name]
    added = (*model.special, *model.plain)
    halves = {half for text in added for half in (text[: len(text) // 2], text[len(text) // 2 :])}
    return st.lists(st.sampled_from(sorted({*added, *halves, " ", "a", "\n", "end|>", "<"})), max_size=8).map("".join)


@functools.cache
def loaded(name: str, kind: str, folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    """Write the tokenizer of a model into a folder, and load it."""
    model, template = CHAT_MODELS[name], _template(name)
    folder = folder / f"{name}, {kind}"
    folder.mkdir()
    inner = tokenizer_of(kind)
    inner.add_special_tokens(list(model.special))
    inner.add_tokens([AddedToken(token, normalized=False) for token in model.plain])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": model.bos, "eos_token": model.eos}))
    tokenizer = Tokenizer.load(folder, template)
    assert tokenizer is not None
    return tokenizer, template


@functools.cache
def _template(name: str) -> ChatTemplate:
    model = CHAT_MODELS[name]
    tokens = {"bos_token": model.bos, "eos_token": model.eos}
    return ChatTemplate(TokenizerConfig(tokens, {"default": model.template}))


def tokenizer_of(kind: str) -> tokenizers.Tokenizer:
    """Return a tokenizer without added tokens that knows all of ASCII, and a few longer words."""
    if kind == "byte_level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = _bpe(alphabet, ["im", "\u0120a", "end", "st", "<|", "|>"])
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return made
    if kind == "unigram":
        words = [(letter, -3.0) for letter in _LETTERS] + [("<|", -2.0), ("</s>", 0.0), ("<|im_end|>", 0.0)]
        made = tokenizers.Tokenizer(models.Unigram([("<unk>", -9.0), *words], unk_id=0))
        made.decoder = decoders.Fuse()
        return made
    made = _bpe(["\u2581", *_LETTERS], ["\u2581a", "im", "</s>"], unk_token="?")
    if kind == "llama":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        return made
    scheme: Any = kind.removeprefix("metaspace_")
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return made


def _bpe(letters: list[str], words: list[str], **options: Any) -> tokenizers.Tokenizer:
    """Return a BPE of these letters that also makes these words, from left to right."""
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = []
    for word in words:
        for length in range(2, len(word) + 1):
            if word[:length] not in vocab:
                vocab[word[:length]] = len(vocab)
                merges.append((word[: length - 1], word[length - 1]))
    return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
