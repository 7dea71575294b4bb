"""Record the token ids that llama.cpp gives to 1 000 texts, as ``llama_cpp_ids.jsonl``.

    python -m tests.models_real.record_ids

Requires ``llama-cpp-python`` 0.3.36, which compiles its engine. It is not a requirement of any test: the file is
committed, and holds the texts too. 600 texts are lines of this repository, 100 are neighbouring lines, which shows how
ends of lines and indentation are split, and 300 are made of what tokenizers get wrong: digits, spaces, contractions,
scripts, emoji, text that looks like a control token. The first line of the file says what it was made with.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import subprocess
from pathlib import Path
from typing import NamedTuple

from ferrule_server.named_models import SMOLLM2

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("llama_cpp_ids.jsonl")
_KINDS = ("*.md", "*.py", "*.proto", "*.yaml", "*.yml", "*.toml", "*.go", "*.ts", "*.rs", "*.cpp", "*.sh", "LICENSE")
_LONGEST = 120
_PARTS = [
    *("0", "7", "42", "2026", "3.14159", "1e-4", "0x1F", "1,000,000", "٣٤٥", "१२", "Ⅷ", "½", "x²", "⑦"),
    *("it's", "IT'S", "we'll", "they've", "I'd", "don't", "you're", "I'm", "'s", "’s", "rock'n'roll"),  # noqa: RUF001
    *(" ", "  ", "   ", "       ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\n    ", " \n", "\u00a0", "\u3000", "\u2009"),
    *("\u200b", "\ufeff", "\u0085", "\u2028", "\u00ad", "\x00", "\x7f", "\ufffd"),
    *("naïve", "nai\u0308ve", "Zürich", "ẞ", "ŒUVRE", "Привет", "мир", "καλημέρα", "שלום", "مرحبا", "नमस्ते", "ไทย"),
    *("你好", "世界", "こんにちは", "カタカナ", "안녕", "각", "\U0001d518\U0001d52b\U0001d526", "𐍈", "ﬁ"),
    *("😀", "👍🏽", "👩‍👩‍👧", "🇮🇹", "❤️", "☃", "→", "≠", "∑", "…", "—", "«", "»"),
    *("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>", "<|im_", "</s>"),
    *("def f(x):", "return", "i++", "a->b", "!=", "==", "...", "();", "{}", "[0]", "#", "//", "/*", "$", "%d", "\\n"),
    *("The", "the", " quick", "brown", "HTTPServer", "snake_case", "camelCase", "user@example.org", "C:\\dir"),
    *("https://", "www."),
]


class Recorded(NamedTuple):
    """A text and its tokens, without a begin token and with no control token."""

    text: str
    token_ids: list[int]


def main() -> None:
    """Write the record again."""
    from llama_cpp import Llama, __version__

    path = SMOLLM2.find()
    model = Llama(str(path), vocab_only=True, verbose=False)
    made = {
        "made_with": f"llama-cpp-python {__version__}",
        "model": path.name,
        "sha256": SMOLLM2.sha256,
        "date": str(dt.datetime.now(tz=dt.UTC).date()),
    }
    rows = [[text, *model.tokenize(text.encode(), add_bos=False, special=False)] for text in texts()]
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in [made, *rows])
    RECORD.write_text("\n".join(lines) + "\n", "utf-8")


def recorded() -> list[Recorded]:
    """Return what the file holds."""
    _, *lines = RECORD.read_text("utf-8").split("\n")[:-1]
    return [Recorded(text, token_ids) for text, *token_ids in map(json.loads, lines)]


def made_with() -> dict[str, str]:
    """Return with what the file was made, and from which model."""
    found: dict[str, str] = json.loads(RECORD.read_text("utf-8").partition("\n")[0])
    return found


def texts() -> list[str]:
    """Return 1 000 different texts; those from the repository are as it is now."""
    rng = random.Random(1)
    lines, pieces = _repository()
    made = dict.fromkeys(_mixture(rng) for _ in range(400))
    return [*rng.sample(lines, 600), *rng.sample(pieces, 100), *list(made)[:300]]


def _repository() -> tuple[list[str], list[str]]:
    """Return the distinct lines of its files, and pieces of three lines."""
    listed = subprocess.run(["git", "ls-files", *_KINDS], cwd=ROOT, capture_output=True, text=True, check=True)
    lines, pieces = dict[str, None](), dict[str, None]()
    for name in listed.stdout.splitlines():
        found = (ROOT / name).read_text("utf-8").splitlines()
        lines |= dict.fromkeys(line for line in found if line.strip() and len(line) <= _LONGEST)
        pieces |= dict.fromkeys("\n".join(found[i : i + 3]) for i in range(0, len(found) - 3, 3))
    return list(lines), [piece for piece in pieces if piece.strip() and len(piece) <= 2 * _LONGEST]


def _mixture(rng: random.Random) -> str:
    """Return a few parts one after another, with or without spaces between them."""
    return rng.choice(["", "", " "]).join(rng.choices(_PARTS, k=rng.randint(1, 9)))


if __name__ == "__main__":
    main()
