"""Render conversations with published chat templates, as the product does and as transformers does.

    python -m tests.published_templates [FOLDER]

The templates are those in FOLDER, or of the source distribution of llama-cpp-python, which pip fetches, and those of
this repository. The product must refuse no conversation that transformers renders. The texts must be equal, unless the
product brings a message into another form (``message_forms.py``). A table and a line of JSON; exit code 1 otherwise.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import models

from ferrule_server.errors import InvalidRequest, ModelError
from ferrule_server.text.chat_template import ChatTemplate, Conversation
from ferrule_server.text.tokenizer_config import TokenizerConfig
from tests.published_templates.conversations import ASKED, Asked
from tests.text.chat_models import CHAT_MODELS

_PACKAGE: Final = "llama-cpp-python==0.3.36"
_TEMPLATES: Final = "vendor/llama.cpp/models/templates"
_OWN: Final = Path(__file__).parents[1] / "text" / "templates"
_TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}


def main() -> int:
    """Compare all templates and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(sys.argv[1]) if len(sys.argv) > 1 else _fetched(Path(folder))
        sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(found.glob("*.jinja"))}
    own = {f"own {path.stem}": path.read_text(encoding="utf-8") for path in sorted(_OWN.glob("*.jinja"))}
    own |= {f"own model {name}": model.template for name, model in CHAT_MODELS.items()}
    counts, faults = Counter[str](), list[str]()
    for name, source in (sources | own).items():
        for kind, where in _compared(source):
            counts[kind] += 1
            faults += [f"{kind}: {name}: {where}"] if kind in ("only we refuse", "differs") else []
    print("\n".join(faults))
    for kind, number in sorted(counts.items()):
        print(f"{number:7d}  {kind}")
    facts = {"date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}", "templates": len(sources), "own": len(own)}
    print(json.dumps({**facts, "conversations": 2 * len(ASKED), **counts}))
    return int(bool(faults) or not sources)


def _fetched(folder: Path) -> Path:
    """Return a folder with the templates of the source distribution."""
    fetch = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), _PACKAGE]
    subprocess.run([sys.executable, "-m", "pip", *fetch], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        wanted = [member for member in opened if member.isfile() and f"/{_TEMPLATES}/" in member.name]
        opened.extractall(folder, wanted, filter="data")
    return next(folder.glob(f"*/{_TEMPLATES}"))


def _compared(source: str) -> Iterator[tuple[str, str]]:
    """Yield for each conversation what came of the comparison, and its name."""
    reference = _reference(source)
    try:
        ours = ChatTemplate(TokenizerConfig(_TOKENS, {"default": source}))
    except ModelError as error:
        yield "only we refuse", f"all conversations: {error}"
        return
    for name, asked in ASKED.items():
        for prompts in (True, False):
            conversation = Conversation(
                asked.messages, asked.tools, prompts and not asked.continues, continue_final_message=asked.continues
            )
            expected: str | None = None
            with contextlib.suppress(Exception):  # a template may fail in any way
                expected = reference(asked, prompts and not asked.continues)
            yield _kind(ours, conversation, expected), name


def _reference(source: str) -> Callable[[Asked, bool], str]:
    """Return what renders a conversation with transformers."""
    import transformers

    inner = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=inner, **_TOKENS)

    def render(asked: Asked, prompts: bool) -> str:
        options = {"add_generation_prompt": prompts, "continue_final_message": asked.continues, "tokenize": False}
        return str(tokenizer.apply_chat_template(asked.messages, asked.tools, chat_template=source, **options))

    return render


def _kind(ours: ChatTemplate, conversation: Conversation, expected: str | None) -> str:
    try:
        text = ours.render(conversation)
    except InvalidRequest:
        return "both refuse" if expected is None else "only we refuse"
    if expected is None:
        return "only transformers refuses"
    if text == expected:
        return "equal"
    if any(message.get("content", "") is None for message in conversation.messages):
        return "null, which transformers leaves out"
    form = ours.in_its_form(conversation, lambda form: form)
    is_as_given = form.messages == list(conversation.messages)
    return "differs" if is_as_given else "another form of a message"


if __name__ == "__main__":
    sys.exit(main())
