"""``ferrule demo``: what handles are good for, shown on a server of its own."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ferrule_cli.common import add_numbers, ending_in_order, need_server, number, print_json
from ferrule_cli.demo.server import ServerProcess
from ferrule_cli.demo.view import PlainView, PoolRow, RichView, View
from ferrule_client.items import Append
from ferrule_client.policy import sample
from ferrule_client.sync.cache import Cache
from ferrule_client.sync.client import Client
from ferrule_client.types import Status

__all__ = ["EXAMPLES", "Figures", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule demo                                      with the small bundled model
  ferrule demo --model /path/to/Qwen3-0.6B          with a model of yours
  ferrule demo --executor paged-reference           without any weights, on token ids
  ferrule demo --json                               figures for scripts; the story goes to standard error
"""

# It ends without a newline: a newline and the indentation after it are one token, which the model is to choose.
_PROMPT = '''"""Reading settings from files."""

import json
import os


class Settings:
    """A set of named values."""

    def __init__(self, path):
        self.path = path
        self.values = {}


def read_file(path):'''

_TEMPERATURE = 0.7
_TRUNK_SEED = 5
_BRANCH_SEEDS = (1, 8, 21)
_RETRY_SEED = 15
_NUM_KEPT = 12
_LOAD_S = 120.0


@dataclass
class Figures:
    """What the demo measured. Rates are as the client sees them, transport included."""

    model: str = ""
    executor: str = ""
    load_s: float = 0.0
    prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    branches_tokens_per_s: float = 0.0
    peak_blocks: int = 0
    peak_blocks_without_sharing: int = 0
    leaked_blocks: int = 0
    server_exit_code: int | None = None
    total_s: float = 0.0
    texts: dict[str, str] = field(default_factory=dict)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--model", metavar="FOLDER", help="a model folder, or demo: the bundled model (default)")
    parser.add_argument("--executor", metavar="NAME", help="executor of the server: auto, torch or paged-reference")
    add_numbers(parser, ("--max-tokens", number(int, 16, 512), 48, "N", "tokens of each continuation (48)"))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Tell the story on a server of our own and return 0 if all went well and no block leaked, else 1."""
    need_server()
    view: View = PlainView(sys.stderr if args.json else sys.stdout)
    if not args.json and sys.stdout.isatty():
        view = RichView()
    figures = Figures()
    start = time.perf_counter()
    arguments = ["--kv-memory", "64MiB", "--log-level", "info"]
    if args.executor is not None:
        arguments += ["--executor", args.executor]
    if args.executor != "paged-reference" or args.model is not None:
        arguments += ["--model", args.model or "demo"]

    def show(status: Status | None) -> None:
        progress, stage = (0.0, "starting Python") if status is None else (status.load_progress, status.load_stage)
        view.loading(min(0.99, progress), stage)

    with ending_in_order(), ServerProcess(arguments) as server:
        with Client(server.target, max_retries=0) as client:
            loading_from = time.perf_counter()
            server.wait_until_ready(client, show, _LOAD_S)
            view.loading(1.0, "ready")
            figures.load_s = time.perf_counter() - loading_from
            _Story(client, view, figures, args.max_tokens).tell()
        figures.server_exit_code = server.stop()
    figures.total_s = time.perf_counter() - start
    is_good = figures.leaked_blocks == 0 and figures.server_exit_code == 0
    view.summary(_summary(figures), is_good=is_good)
    view.note('next: `ferrule serve` here, and `ferrule generate "def area("` in another terminal')
    if args.json:
        print_json({name: round(v, 3) if isinstance(v, float) else v for name, v in vars(figures).items()})
    return 0 if is_good else 1


class _Story:
    """The demo's parts, in the order they are told; each leaves its caches for the next."""

    def __init__(self, client: Client, view: View, figures: Figures, max_tokens: int) -> None:
        self._client = client
        self._view = view
        self._figures = figures
        self._max_tokens = max_tokens
        self._info = client.model_info()
        self._stops = frozenset(self._info.eos_token_ids + self._info.stop_token_ids)
        capabilities = client.capabilities()
        self._total_blocks = capabilities.total_blocks
        self._has_text = "tokenizer" in capabilities.features
        self._beginning = ""

    def tell(self) -> None:
        """Tell it all; every sequence is released at the end, whatever happens."""
        trunk, ids = self._prefill()
        with trunk:
            self._stream(trunk)
            self._draw_pool([trunk])
            with trunk.fork(len(_BRANCH_SEEDS), length=len(ids)) as branches:
                self._speak_together(branches, ids)
                self._draw_pool([trunk, *branches])
                self._roll_back(branches[2], ids)
        free = self._client.status().free_blocks
        self._figures.leaked_blocks = self._total_blocks - free
        self._view.heading("5  Release", "all four handles are gone")
        self._view.pool([], free, self._total_blocks)

    def _prefill(self) -> tuple[Cache, list[int]]:
        info, view, figures = self._info, self._view, self._figures
        figures.model, figures.executor = info.model_id, self._client.status().executor
        text = _PROMPT if self._has_text else ""
        ids = [(7 * i + 3) % info.vocab_size for i in range(72)]
        if text:
            ids = self._client.tokenize(text, add_special_tokens="begin")
        size = f"{info.num_parameters / 1e6:.1f} M parameters, " if info.num_parameters else ""
        about = f"{info.architecture}, {size}{info.dtype}, {info.device_name or info.device_type}"
        view.heading("1  Prefill", f"{info.model_id}: {about}; executor {figures.executor}")
        view.code(text or " ".join(map(str, ids)))
        start = time.perf_counter()
        trunk = self._client.prefill(ids)
        seconds = time.perf_counter() - start
        figures.prefill_tokens, figures.prefill_tokens_per_s = len(ids), len(ids) / seconds
        rate = f"{len(ids)} tokens in {1e3 * seconds:.1f} ms, {len(ids) / seconds:.0f} tokens/s"
        view.note(f"{rate}  ->  {trunk.handle!r}")
        self._beginning = text.splitlines()[-1] if text else ""
        return trunk, ids

    def _speak(self, cache: Cache, seed: int, title: str, beginning: str) -> tuple[str, int, float]:
        """Show a continuation; return its text, its tokens and the seconds that it took, drawing included."""
        policy = sample(temperature=_TEMPERATURE, seed=seed)
        text, num_tokens = "", 0
        loop = cache.generate(self._max_tokens, policy=policy, text=self._has_text)
        with loop, self._view.panels([title], [beginning]) as add:
            start = time.perf_counter()
            for token in loop:
                num_tokens += 1
                text += (piece := token.text if self._has_text else f"{int(token)} ")
                add(0, piece)  # tokens go on coming meanwhile, so its time counts
            seconds = time.perf_counter() - start
        return text, num_tokens, seconds

    def _stream(self, trunk: Cache) -> None:
        text = f"the server draws at temperature {_TEMPERATURE} and streams the text: one call"
        self._view.heading("2  Stream", text)
        spoken, num_tokens, seconds = self._speak(trunk, _TRUNK_SEED, "trunk", self._beginning)
        self._figures.texts["trunk"] = spoken
        self._figures.decode_tokens_per_s = num_tokens / seconds
        self._view.note(f"{num_tokens} tokens, {self._figures.decode_tokens_per_s:.0f} tokens/s")

    def _speak_together(self, branches: Sequence[Cache], ids: Sequence[int]) -> None:
        text = "three branches from the prompt's handle share its blocks; one packed frame per step moves all"
        self._view.heading("3  Fork", text)
        policies = [sample(temperature=_TEMPERATURE, seed=seed) for seed in _BRANCH_SEEDS]
        readers = [self._reader(ids) for _ in branches]
        texts = [""] * len(branches)
        alive = list(range(len(branches)))
        seconds, num_tokens = 0.0, 0
        titles = [f"branch {place + 1}, seed {seed}" for place, seed in enumerate(_BRANCH_SEEDS)]
        with self._client.stream() as stream, self._view.panels(titles, [self._beginning] * len(branches)) as add:
            for _ in range(self._max_tokens):
                start = time.perf_counter()
                # At first nothing is appended: a token is chosen from the prompt's last row, and is then pending.
                outputs = stream.run([Append(branches[place], policy=policies[place]) for place in alive])
                seconds += time.perf_counter() - start
                num_tokens += len(outputs)
                for place, output in zip(alive, outputs, strict=True):
                    texts[place] += (piece := readers[place](output.token))
                    add(place, piece)
                alive = [place for place, out in zip(alive, outputs, strict=True) if out.token not in self._stops]
                if not alive:
                    break
        self._figures.branches_tokens_per_s = num_tokens / seconds
        self._figures.texts |= {f"branch {place}": text for place, text in enumerate(texts, 1)}
        self._view.note(f"together {self._figures.branches_tokens_per_s:.0f} tokens/s on one stream")

    def _roll_back(self, branch: Cache, ids: Sequence[int]) -> None:
        keep = min(len(ids) + _NUM_KEPT, branch.length)
        dropped = branch.length - keep
        freed = branch.truncate(keep)
        self._view.heading("4  Roll back", f"branch 3 forgets {dropped} tokens ({freed} blocks freed) and tries again")
        kept = branch.info(token_ids=True).token_ids[len(ids) :]
        beginning = self._beginning + "".join(map(self._reader(ids), kept))
        text, *_ = self._speak(branch, _RETRY_SEED, f"branch 3, seed {_RETRY_SEED}", beginning)
        self._figures.texts["branch 3, again"] = text

    def _draw_pool(self, caches: Sequence[Cache]) -> None:
        names = ["trunk", "branch 1", "branch 2", "branch 3"]
        infos = [cache.info(blocks=True) for cache in caches]
        rows = [PoolRow(name, i.block_ids, i.block_ref_counts) for name, i in zip(names, infos, strict=False)]
        self._figures.peak_blocks = len({block for info in infos for block in info.block_ids})
        self._figures.peak_blocks_without_sharing = sum(info.num_blocks for info in infos)
        self._view.pool(rows, self._client.status().free_blocks, self._total_blocks)

    def _reader(self, context: Sequence[int]) -> Callable[[int], str]:
        """Return what turns one branch's tokens into pieces of text, or into numbers without a tokenizer."""
        if not self._has_text:
            return "{} ".format
        detokenizer = self._client.detokenizer(context)
        return lambda token: "" if token in self._stops else detokenizer.push(token)


def _summary(figures: Figures) -> list[tuple[str, str]]:
    return [
        ("prefill", f"{figures.prefill_tokens_per_s:.0f} tokens/s ({figures.prefill_tokens} tokens)"),
        ("decode, one handle", f"{figures.decode_tokens_per_s:.0f} tokens/s"),
        ("decode, three on one stream", f"{figures.branches_tokens_per_s:.0f} tokens/s"),
        ("blocks for four handles", f"{figures.peak_blocks}, without sharing {figures.peak_blocks_without_sharing}"),
        ("blocks leaked", str(figures.leaked_blocks)),
        ("server", f"ended with exit code {figures.server_exit_code}"),
        ("time", f"{figures.total_s:.1f} s, of which loading {figures.load_s:.1f} s"),
    ]
