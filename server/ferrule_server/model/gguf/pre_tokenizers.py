r"""How the byte-pair tokenizers of GGUF files split a text before the merges, by the name in ``tokenizer.ggml.pre``.

A GGUF file holds this name instead of regular expressions. The names, the expressions and what else a name implies are
facts of ``src/llama-vocab.cpp`` in llama.cpp (as in llama-cpp-python 0.3.36, MIT licence). Where the splitter of
llama.cpp only approximates the expressions of the models, which that source quotes, those of the models are used:

* It knows no letter case in classes such as ``\p{Lu}``, and drops marks from some expressions: ``gpt-4o``, ``tekken``,
  ``tiny_aya`` and the names that share their rules.
* It takes spaces beyond ASCII for U+000B: ``deepseek-llm``, ``deepseek-coder``.
* It leaves a text before a number with the first digits: ``tiny_aya``.

Groups of three digits, and spaces at the end of a text, are written so that the time is linear in the text. Names of
models that are not served (``jina-v2-de``, ``kimi-k2``, ...) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Rule:
    """What the name of a pre-tokenizer implies.

    Attributes:
        splits: Regular expressions of Oniguruma, each applied to the pieces that the earlier ones left. Matches, and
            the texts between them, are pieces.
        ignores_merges: A piece that is a token as a whole becomes that token, whatever the merges say.
        adds_begin: A begin token is added unless the file says otherwise.
        is_byte_level: Tokens are spelled in the byte-level alphabet of GPT-2; otherwise with U+2581 for spaces.
    """

    splits: tuple[str, ...]
    ignores_merges: bool = False
    adds_begin: bool = False
    is_byte_level: bool = True


def _class(ranges: str) -> str:
    """Return a character class of code points and ranges of them, in hexadecimal digits.

    They are not written as characters, because programs that normalize a text would change them.
    """
    ends = (part.partition("-") for part in ranges.split())
    return "[" + "".join(rf"\x{{{first}}}-\x{{{last or first}}}" for first, _, last in ends) + "]"


_SUFFIXES: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_THREE: Final = r"\p{N}{1,3}"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_SLASH: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES: Final = r"\s+(?!\S)|\s+"
_LINES: Final = rf"\s*[\r\n]+|{_SPACES}"

_GPT2: Final = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_LLAMA3: Final = f"{_SUFFIXES}|{_WORD}|{_THREE}|{_SIGNS}|{_LINES}"
_QWEN2: Final = rf"{_SUFFIXES}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}"
_QWEN35: Final = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_SEED: Final = rf"{_SUFFIXES}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
_LETTERS_OR_NUMBERS: Final = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4})\x{60C}]+"


def _cased(suffixes: str, rest: str, other_than: str = "") -> str:
    """Return an expression in which a capital letter after a small one begins a word."""
    without = f"&&[^{other_than}]" if other_than else ""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
    )
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{upper}*{lower}+{suffixes}|{lead}{upper}+{lower}*{suffixes}|{rest}|{_LINES}"


_GPT4O: Final = _cased(f"{_SUFFIXES}?", f"{_THREE}|{_SIGNS_SLASH}")
_TEKKEN: Final = _cased("", rf"\p{{N}}|{_SIGNS_SLASH}")
_HAN_KANA: Final = f"{_class('4E00-9FA5 3040-309F 30A0-30FF')}+"

_SIGN_AND_WORD: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_HAN_HANGUL: Final = f"{_class('4E00-9FA5 800-4E00 AC00-D7FF')}+"
_DEEPSEEK3: Final = rf"{_SIGN_AND_WORD}[\r\n]*|{_LINES}"
_CASED_LETTERS: Final = _class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1"
    " 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A"
    " 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4"
    " 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128"
    " 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D"
    " A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3"
    " 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?{_CASED_LETTERS}+",
    rf"\s?{_class('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}+",
    r"(?<!\s)\s++\z",
    _HAN_HANGUL,
    r"\p{N}+",
)
_THREES_FROM_THE_RIGHT: Final = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{1,3}"
_BY_LINE: Final = (r"[^\n]+|\n+",)

_GROUPS: Final[Mapping[str, Rule]] = {
    "default": Rule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4": Rule((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Rule((r"\p{N}", _GPT2)),
    "falcon": Rule((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Rule(
        (_LLAMA3,), ignores_merges=True, adds_begin=True
    ),
    "glm4 glm5": Rule((_LLAMA3,), ignores_merges=True),
    "dbrx smaug-bpe chatglm-bpe": Rule((_LLAMA3,)),
    "minicpm5": Rule((_THREE, rf"{_SUFFIXES}|{_WORD}|\p{{N}}+|{_SIGNS}|{_LINES}"), ignores_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2": Rule((_QWEN2,)),
    "qwen35": Rule((_QWEN35,)),
    "seed-coder": Rule((_SEED,)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Rule((_GPT4O,)),
    "tiny_aya cohere2moe": Rule((_THREES_FROM_THE_RIGHT, _GPT4O)),
    "tekken": Rule((_TEKKEN,), ignores_merges=True, adds_begin=True),
    "deepseek-llm": Rule(_DEEPSEEK_LLM),
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": Rule((_THREE, _HAN_KANA, _DEEPSEEK3)),
    "superbpe": Rule((r"\p{N}+", _THREES_FROM_THE_RIGHT.replace(r"\p{N}", "[0-9]"))),
    "poro-chat bloom gpt3-finnish": Rule((_LETTERS_OR_NUMBERS,)),
    "viking": Rule((_LETTERS_OR_NUMBERS, r"\p{N}")),
    "gemma4": Rule(_BY_LINE, adds_begin=True, is_byte_level=False),
}

RULES: Final[Mapping[str, Rule]] = {name: rule for names, rule in _GROUPS.items() for name in names.split()}
"""What a name implies, by the name."""
