"""Windows: blocks that no row reads any more go back to the pool, in sequences that were made with that option.

A row of a model with a window W attends to the last W tokens up to its own. In a layer with chunks of W tokens it
attends to some of the last W tokens, so a chunk counts as a window (``ModelConfig.attention_window``). A sequence with
the option keeps its last 2 W + 1 tokens and the rest of their first block, so it can be continued, forked, truncated or
rewound exactly at any length down to W tokens before its tip. The table keeps its length: entries of blocks that were
given back are the null block, whose contents no row reads::

    block_size 4, window 3, 20 tokens       table   [0] [0] [0] [D D D D] [E E E E]
    first position 12, lowest length 15             given back   held

Blocks given back were full, so the prefix cache may know them. Then it keeps them as it keeps those of a released
sequence. They have fewer owners than the blocks after them in other tables, see :meth:`BlockPool.count_shared`.
"""

from __future__ import annotations

from ferrule_server.kv.block_pool import NULL_BLOCK
from ferrule_server.kv.sequence import Sequence


def num_outside(sequence: Sequence, start: int, stop: int, block_size: int) -> int:
    """Return how many blocks the sequence has given back after an append to it, those before the append included.

    Nothing is given back until an append fills a block: so most appends of one token have nothing to compute.

    Args:
        sequence: One with a window.
        start: Its length before the append.
        stop: Its length after it.
        block_size: Slots per block.
    """
    if start // block_size == stop // block_size:
        return sequence.num_given_back
    return max(sequence.num_given_back, (stop - 2 * sequence.window - 1) // block_size)


def without_first(block_ids: list[int], count: int) -> list[int]:
    """Return a block table whose first ``count`` blocks were given back."""
    return [NULL_BLOCK] * count + block_ids[count:]


def give_back(sequence: Sequence, start: int, block_size: int) -> list[int]:
    """Take the blocks outside the window from the table after an append, and return them in the order of the table.

    Args:
        sequence: One with a window, after the append.
        start: Its length before the append; 0: it is new.
        block_size: Slots per block.
    """
    num_before, count = sequence.num_given_back, num_outside(sequence, start, sequence.length, block_size)
    if count == num_before:
        return []
    given_back = sequence.block_ids[num_before:count]
    sequence.block_ids = without_first(sequence.block_ids, count)
    set_window(sequence, sequence.window, count, block_size)
    return given_back


def set_window(sequence: Sequence, window: int, num_given_back: int, block_size: int) -> None:
    """Note the window of a sequence, and how many blocks its table lacks."""
    sequence.window, sequence.num_given_back = window, num_given_back
    sequence.lowest_length = num_given_back * block_size + window if num_given_back else 1
