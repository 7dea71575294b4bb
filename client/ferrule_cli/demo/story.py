"""``ferrule demo``: what handles are good for, shown on a server of its own."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ferrule_cli.common import CommandError, ending_in_order, number, print_json
from ferrule_cli.demo.server import ServerProcess
from ferrule_cli.demo.view import PoolRow, View, select_view
from ferrule_client.errors import FerruleError
from ferrule_client.items import Append
from ferrule_client.policy import Policy, sample
from ferrule_client.sync.cache import Cache
from ferrule_client.sync.client import Client
from ferrule_client.sync.generation import Generation
from ferrule_client.types import ModelInfo, Status, Token

__all__ = ["EXAMPLES", "Figures", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule demo                                      with the small model that ships
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

    @property
    def is_good(self) -> bool:
        """True: no block leaked and the server ended as it should."""
        return self.leaked_blocks == 0 and self.server_exit_code == 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--model", metavar="FOLDER", help="a model folder, or demo: the one that ships (default)")
    parser.add_argument("--executor", metavar="NAME", help="executor of the server: auto, torch or paged-reference")
    parser.add_argument(
        "--max-tokens", type=number(int, 16, 512), default=48, metavar="N", help="tokens of each continuation (48)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Tell the story on a server of our own and return 0 if all went well and no block leaked, else 1.

    Raises:
        CommandError: The server did not start or broke down.
        FerruleError: A call failed.
    """
    view = select_view(as_json=args.json)
    figures = Figures()
    start = time.perf_counter()
    with ending_in_order(), ServerProcess(_server_arguments(args)) as server:
        try:
            with Client(server.target, max_retries=0) as client:
                _wait(client, server, view, figures)
                _Story(client, view, figures, args.max_tokens).tell()
        except (CommandError, FerruleError):
            print(server.log_tail(), file=sys.stderr)
            raise
        figures.server_exit_code = server.stop()
    figures.total_s = time.perf_counter() - start
    view.summary(_summary(figures), is_good=figures.is_good)
    view.note('next: `ferrule serve` here, and `ferrule generate "def area("` in another terminal')
    if args.json:
        print_json({name: round(v, 3) if isinstance(v, float) else v for name, v in vars(figures).items()})
    return 0 if figures.is_good else 1


def _server_arguments(args: argparse.Namespace) -> list[str]:
    arguments = ["--kv-memory", "64MiB", "--log-level", "info"]
    if args.executor is not None:
        arguments += ["--executor", args.executor]
    if args.executor != "paged-reference" or args.model is not None:
        arguments += ["--model", args.model or "demo"]
    return arguments


def _wait(client: Client, server: ServerProcess, view: View, figures: Figures) -> None:
    """Return when the server is ready; show how far it is."""

    def show(status: Status | None) -> None:
        server.check()
        if status is None:
            view.loading(0.0, "starting Python")
        else:
            view.loading(min(0.99, status.load_progress), status.load_stage)

    start = time.perf_counter()
    client.wait_until_ready(on_progress=show, timeout=_LOAD_S)
    view.loading(1.0, "ready")
    figures.load_s = time.perf_counter() - start


class _Story:
    """The demo's parts, in the order they are told; each leaves its caches for the next."""

    def __init__(self, client: Client, view: View, figures: Figures, max_tokens: int) -> None:
        self._client = client
        self._view = view
        self._figures = figures
        self._max_tokens = max_tokens
        self._info: ModelInfo = client.model_info()
        self._stops = frozenset(self._info.eos_token_ids + self._info.stop_token_ids)
        capabilities = client.capabilities()
        self._total_blocks = capabilities.total_blocks
        self._has_text = "tokenizer" in capabilities.features
        self._beginning = ""

    def tell(self) -> None:
        """Tell it all; every sequence is released at the end, whatever happens."""
        trunk, ids = self._prefill()
        with trunk:
            self._speak(trunk)
            self._draw_pool([trunk])
            with trunk.fork(len(_BRANCH_SEEDS), length=len(ids)) as branches:
                self._speak_together(branches, ids)
                self._draw_pool([trunk, *branches])
                self._roll_back(branches[2], ids)
        self._after_release()

    def _prefill(self) -> tuple[Cache, list[int]]:
        info, view, figures = self._info, self._view, self._figures
        figures.model, figures.executor = info.model_id, self._client.status().executor
        text = _PROMPT if self._has_text else ""
        ids = self._client.tokenize(text) if text else [(7 * i + 3) % info.vocab_size for i in range(72)]
        size = f"{info.num_parameters / 1e6:.1f} M parameters, " if info.num_parameters else ""
        about = f"{info.architecture}, {size}{info.dtype}, {info.device_name or info.device_type}"
        view.heading("1  Prefill", f"{info.model_id}: {about}; executor {figures.executor}")
        view.code(text or " ".join(map(str, ids)))
        start = time.perf_counter()
        trunk = self._client.prefill(ids)
        seconds = time.perf_counter() - start
        figures.prefill_tokens, figures.prefill_tokens_per_s = len(ids), len(ids) / seconds
        view.note(
            f"{len(ids)} tokens in {1e3 * seconds:.1f} ms, {len(ids) / seconds:.0f} tokens/s  ->  {trunk.handle!r}"
        )
        self._beginning = text.splitlines()[-1] if text else ""
        return trunk, ids

    def _generate(self, cache: Cache, seed: int) -> Generation:
        return cache.generate(self._max_tokens, policy=sample(temperature=_TEMPERATURE, seed=seed), text=self._has_text)

    def _piece(self, token: Token) -> str:
        return token.text if self._has_text else f"{int(token)} "

    def _speak(self, trunk: Cache) -> None:
        text = f"the server draws at temperature {_TEMPERATURE} and streams the text: one call"
        self._view.heading("2  Stream", text)
        loop = self._generate(trunk, _TRUNK_SEED)
        times_s: list[float] = []
        text = ""
        with loop, self._view.panels(["trunk"], [self._beginning]) as panels:
            for token in _timed(loop, times_s):
                text += (piece := self._piece(token))
                panels.add(0, piece)
        self._figures.texts["trunk"] = text
        self._figures.decode_tokens_per_s = len(times_s[1:]) / sum(times_s[1:])
        self._view.note(f"{len(loop.tokens)} tokens, {self._figures.decode_tokens_per_s:.0f} tokens/s")

    def _speak_together(self, branches: Sequence[Cache], ids: Sequence[int]) -> None:
        self._view.heading(
            "3  Fork", "three branches from the prompt's handle share its blocks; one packed frame per step moves all"
        )
        names = [f"branch {place + 1}" for place in range(len(branches))]
        policies = [sample(temperature=_TEMPERATURE, seed=seed) for seed in _BRANCH_SEEDS]
        texts = self._decode_together(branches, policies, names, ids)
        self._figures.texts |= dict(zip(names, texts, strict=True))
        self._view.note(f"together {self._figures.branches_tokens_per_s:.0f} tokens/s on one stream")

    def _decode_together(
        self, branches: Sequence[Cache], policies: Sequence[Policy], names: Sequence[str], ids: Sequence[int]
    ) -> list[str]:
        readers = [self._reader(ids) for _ in branches]
        tokens: list[list[int]] = [[] for _ in branches]
        texts = [""] * len(branches)
        alive = list(range(len(branches)))
        seconds, num_tokens = 0.0, 0
        titles = [f"{name}, seed {seed}" for name, seed in zip(names, _BRANCH_SEEDS, strict=True)]
        with self._client.stream() as stream, self._view.panels(titles, [self._beginning] * len(branches)) as panels:
            for _ in range(self._max_tokens):
                start = time.perf_counter()
                # At first nothing is appended: a token is chosen from the prompt's last row, and is then pending.
                outputs = stream.run([Append(branches[place], policy=policies[place]) for place in alive])
                seconds += time.perf_counter() - start
                num_tokens += len(outputs)
                for place, output in zip(alive, outputs, strict=True):
                    tokens[place].append(output.token)
                    texts[place] += (piece := readers[place](output.token))
                    panels.add(place, piece)
                alive = [place for place in alive if tokens[place][-1] not in self._stops]
                if not alive:
                    break
        self._figures.branches_tokens_per_s = num_tokens / seconds
        return texts

    def _roll_back(self, branch: Cache, ids: Sequence[int]) -> None:
        keep = min(len(ids) + _NUM_KEPT, branch.length)
        dropped = branch.length - keep
        freed = branch.truncate(keep)
        self._view.heading("4  Roll back", f"branch 3 forgets {dropped} tokens ({freed} blocks freed) and tries again")
        kept = list(branch.info(token_ids=True).token_ids)
        old_reader = self._reader(ids)
        beginning = self._beginning + "".join(old_reader(token) for token in kept[len(ids) :])
        with self._view.panels([f"branch 3, seed {_RETRY_SEED}"], [beginning]) as panels:
            text = ""
            for token in self._generate(branch, _RETRY_SEED):
                text += (piece := self._piece(token))
                panels.add(0, piece)
        self._figures.texts["branch 3, again"] = text

    def _draw_pool(self, caches: Sequence[Cache]) -> None:
        names = ["trunk", "branch 1", "branch 2", "branch 3"]
        infos = [cache.info(blocks=True) for cache in caches]
        rows = [PoolRow(name, i.block_ids, i.block_ref_counts) for name, i in zip(names, infos, strict=False)]
        self._figures.peak_blocks = len({block for info in infos for block in info.block_ids})
        self._figures.peak_blocks_without_sharing = sum(info.num_blocks for info in infos)
        self._view.pool(rows, self._client.status().free_blocks, self._total_blocks)

    def _after_release(self) -> None:
        free = self._client.status().free_blocks
        self._figures.leaked_blocks = self._total_blocks - free
        self._view.heading("5  Release", "all four handles are gone")
        self._view.pool([], free, self._total_blocks)

    def _reader(self, context: Sequence[int]) -> Callable[[int], str]:
        """Return what turns one branch's tokens into pieces of text, or into numbers without a tokenizer."""
        if not self._has_text:
            return "{} ".format
        detokenizer = self._client.detokenizer(context)
        return lambda token: "" if token in self._stops else detokenizer.push(token)


def _timed(tokens: Iterator[Token], times_s: list[float]) -> Iterator[Token]:
    """Pass tokens on and note the seconds that each took to come."""
    while True:
        start = time.perf_counter()
        token = next(tokens, None)
        times_s.append(time.perf_counter() - start)
        if token is None:
            return
        yield token


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
