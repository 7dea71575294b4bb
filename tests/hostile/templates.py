"""Hostile chat templates that spend memory and time when a conversation is rendered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from ferrule.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tests.api.harness import DEMO_FOLDER
from tests.chaos.server_process import ServerProcess
from tests.hostile.folders import demo_folder, replace
from tests.hostile.servers import MemoryWatch, serving
from tests.hostile.verdicts import Attack, Campaign, Outcome

MAX_S = 5.0
MAX_GROWTH_MIB = 300.0
PROMISE = "a template of a stranger takes little memory and time"
BAR = "each answered within 5 s, RSS + < 300 MiB"
_PATIENCE_S = 8.0
_KILL_AT_BYTES = 1 << 30
_WIDE = "3000000000"
BOMBS = {
    "center": "{{ text|center(WIDE) }}",
    "modulo": "{{ ('%' ~ 'WIDE' ~ 'd') % number }}",
    "format filter": "{{ ('%' ~ 'WIDE' ~ 'd')|format(number) }}",
    "format method": "{{ ('{:' ~ 'WIDE' ~ '}').format(number) }}",
    "zfill": "{{ text.zfill(WIDE) }}",
    "ljust": "{{ text.ljust(WIDE) }}",
    "rjust": "{{ text.rjust(WIDE) }}",
    "center method": "{{ text.center(WIDE) }}",
    "replace": "{{ (text * 60000).replace(text, text * 60000) }}",
    "join": "{{ (text * 60000)|join(text * 60000) }}",
    "join method": "{{ (text * 60000).join([text] * 60000) }}",
    "indent": "{{ (text ~ '\\n' ~ text)|indent(WIDE) }}",
    "tojson indent": "{{ [[text]]|tojson(indent=WIDE) }}",
    "translate": "{{ (text * 60000).translate({97: text * 60000}) }}",
    "expandtabs": "{{ (text ~ '\\t').expandtabs(WIDE) }}",
    "batch": "{{ text|batch(300000000, 'x')|list|length }}",
    "slice": "{{ text|slice(300000000)|list|length }}",
    "range": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
}
"""Templates by name; ``text`` and ``number`` come with the conversation, so that nothing is computed at the start."""


def bombs_template() -> str:
    """Return one template that holds all of them, one for each value of the variable ``bomb``."""
    parts = [
        f"{{% if bomb == '{name}' %}}{source.replace('WIDE', _WIDE)}{{% endif %}}" for name, source in BOMBS.items()
    ]
    return "".join(parts)


def run_templates(campaign: Campaign) -> Outcome:
    """Set off every bomb; a server that grows too much is killed and replaced."""
    folder = _folder(campaign.folder)
    figures: dict[str, str] = {}
    left = list(BOMBS)[::3] if campaign.is_quick else list(BOMBS)
    while left:
        with _server(campaign, folder) as server:
            while left:
                name = left.pop(0)
                figures[name], is_usable = _set_off(server, name)
                campaign.progress(f"{name}: {figures[name]}")
                if not is_usable:
                    break
    num_missed = sum(not figure.startswith("holds") for figure in figures.values())
    return Outcome(f"{num_missed} of {len(figures)} bombs missed", figures, BAR, num_missed == 0)


def _folder(parent: Path) -> Path:
    folder = demo_folder(parent, "bombs")
    config = json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())
    replace(folder, "tokenizer_config.json", json.dumps({**config, "chat_template": bombs_template()}).encode())
    return folder


@contextmanager
def _server(campaign: Campaign, folder: Path) -> Iterator[ServerProcess]:
    with serving(campaign, "templates", f"--model={folder}", "--executor=torch", base=("--kv-memory=32MiB",)) as server:
        yield server


def _set_off(server: ServerProcess, name: str) -> tuple[str, bool]:
    """Render one bomb; returns what it cost, and whether the server can be used again."""
    variables = json.dumps({"bomb": name, "text": "a", "number": 1})
    request = tokenizer_pb2.ApplyChatTemplateRequest(
        messages=[{"role": "user", "content": "Hello."}], variables_json=variables
    )
    began_s = time.monotonic()
    with MemoryWatch(server.watched, _KILL_AT_BYTES) as watch:
        answer = _answer(server, request)
    seconds = round(time.monotonic() - began_s, 1)
    is_met = seconds <= MAX_S and watch.grown_mib < MAX_GROWTH_MIB
    figure = f"{'holds' if is_met else 'MISSED'}: {answer}, {seconds} s, RSS + {watch.grown_mib} MiB"
    return figure, is_met and not watch.was_killed


def _answer(server: ServerProcess, request: tokenizer_pb2.ApplyChatTemplateRequest) -> str:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(server.channel)
    try:
        stub.ApplyChatTemplate(request, timeout=_PATIENCE_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


ATTACKS = [Attack("templates", PROMISE, run_templates)]
