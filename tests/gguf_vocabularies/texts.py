"""Texts in which tokenizers may differ: of files, written for the purpose, and generated."""

from __future__ import annotations

import random
import sysconfig
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_REPOSITORY: Final = Path(__file__).parents[2]
_CHUNK: Final = 3000
"""Characters in a text: the regular expressions of llama.cpp recurse, and longer texts end the process."""

WRITTEN: Final = (
    "I've DON'T we'Ll it'S they'RE y'all 'tis 'S 's' ''s 'll'd you\u2019re\u2019s I\u2019m 'M 'D 'VE '\u017f",
    "a\u00a0b\u2003c\u3000d\u0085e\u2028f\u200bg\ufeffh\u180ei\u202fj \u00a0 \u2003\n\u3000\u3000k",
    "日本語のテキスト、中文文本。한국어 텍스트 ภาษาไทย ភាសាខ្មែរ မြန်မာ ລາວ",
    "हिन्दी में पाठ लिखा है। বাংলা লেখা தமிழ் எழுத்து తెలుగు",
    "العربية مع التشكيل: السَّلامُ عَلَيْكُم \u0661\u0662\u0663\u0664\u0665\u0666 עִבְרִית נִקּוּד",
    "Ελληνικά ΚΕΦΑΛΑΊΑ Русский ЗАГЛАВНЫЕ буквы ЁёЙй Հայերեն ქართული",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd 1\ufe0f\u20e3",
    "e\u0301 n\u0303 a\u0308\u0304 \u0301\u0302 x\u0323\u0307 \u212b\u00c5A\u030a",
    "\ufb01 \ufb03 \u01c5 \u01c6 \u00df \u1e9e \u0130 \u0131",
    "camelCase PascalCase HTTPServer getURLForID snake_case SCREAMING_CASE ÉcoleÉcole straßeSTRASSE x1y2z3",
    "½ ¼ ² ³ Ⅷ ⅷ ① ㊿ ๑๒๓ 一二三 १२३४५६७ 3.14159 1,234,567.89 0xDEADBEEF 1e-10 12345678901234567890",
    "!!! ??? ... --- === *** ### ~~~ ``` \"\" ''",
    "\u00ab\u00bb \u201e\u201c \u201a\u2018 \u00bf\u00a1 \u20ac\u00a3 \u00b1\u00d7 \u2192 \u2200 \u2591 \u2122",
    "\x00\x01\x02\x03\x07\x08\x0b\x0c\x0e\x1b[0m\x1c\x1d\x1e\x1f\x7f\x80\x9f",
    "<s></s><unk><pad><|endoftext|><|im_start|>user\nhi<|im_end|>\n<start_of_turn>user\nhi<end_of_turn>",
    "<|user|>\n  hi<|end|>\n<|assistant|>\n </s>  \n a <s> b",
    "<0x41><0x0A>▁▁ ▁a Ġ Ċ <unused5> [PAD] [MASK] <td></td><br/> <|START_OF_TURN_TOKEN|>",
    'if x:\n\tfor i in range(10):\n\t\tprint(f"{i:>3}")\r\n\r\n    return\t \n',
)
_ALPHABETS: Final = (
    " ", " \n", " \t\r\n", "\n", "0123456789", " 0123456789", "a ", "aA", "aA'sStTrReE", "-=", "▁ ", "<>|_",
    "abc \n,.!", "\u00a0 \n", "\u3000 a", "é e\u0301", "日本 a", "\u0661\u06623", "x\u0300\u0301 ",
    "\U0001f642\U0001f44d ",
)  # fmt: skip


def texts(folder: Path | None) -> Iterator[str]:
    """Yield texts of files of this repository, of Python and of a folder, then written and generated ones."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [*sorted(_REPOSITORY.glob("docs/*.md"))[:6], *sorted(_REPOSITORY.glob("server/ferrule_server/kv/*.py"))[:4]]
    files += [*sorted(library.glob("test/cjkencodings/*-utf8.txt")), library / "textwrap.py"]
    files += [] if folder is None else sorted(path for path in folder.rglob("*") if path.is_file())
    for file in filter(Path.exists, files):
        text = file.read_text(encoding="utf-8", errors="replace")
        yield from (text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK))
    yield from WRITTEN
    yield from _generated(random.Random(1))


def _generated(source: random.Random) -> Iterator[str]:
    """Yield texts of few different characters, of words of one block of Unicode, and of any characters."""
    for alphabet in _ALPHABETS:
        yield from ("".join(source.choices(alphabet, k=source.randint(1, 120))) for _ in range(20))
    yield from (character * length for character in " \n\t-=a0" for length in (*range(1, 40), 64, 100, 257))
    assigned = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) not in ("Cs", "Cn", "Co")]
    for _ in range(300):
        start = source.randrange(len(assigned))
        block = [*assigned[start : start + 60], " ", " ", "\n", "a", "1", "."]
        yield "".join(source.choices(block, k=300))
    yield from ("".join(source.choices(assigned, k=300)) for _ in range(100))
    others = [one for one in assigned if not unicodedata.category(one).startswith("L")]
    yield from ("".join(source.choices(["a", "Z", " ", "'", *source.choices(others, k=20)], k=200)) for _ in range(100))
