"""The client's own record of a sequence's tokens."""

from __future__ import annotations

import random
import tracemalloc

from ferrule_client._token_log import TokenLog


def test_log_is_what_was_put_in() -> None:
    """Extended, cut and read from behind, like a list."""
    log = TokenLog([1, 2, 3])
    log.extend([4, 5])
    assert (log.to_list(), log.end, log.is_whole) == ([1, 2, 3, 4, 5], 5, True)
    assert (log.tail(2), log.tail(9)) == ((4, 5), (1, 2, 3, 4, 5))
    log.cut(2)
    log.extend([2**32 - 1])
    assert log.to_list() == [1, 2, 2**32 - 1]


def test_log_without_a_beginning_says_so() -> None:
    """What was there before it began is unknown; cut below that, it knows nothing."""
    log = TokenLog(start=10)
    log.extend([1, 2])
    assert (log.end, log.is_whole, log.tail(8)) == (12, False, (1, 2))
    branch = log.branch(11)
    assert (branch.end, branch.tail(8)) == (11, (1,))
    log.cut(4)
    assert (log.end, log.is_whole, log.tail(8)) == (4, False, ())


def test_branches_do_not_see_each_other() -> None:
    """Random growth, cuts and branches against plain lists."""
    rng = random.Random(5)
    logs = [(TokenLog([7]), [7])]
    for _ in range(2_000):
        log, ids = rng.choice(logs)
        action = rng.randrange(4)
        if action == 0 and len(logs) < 40:
            length = rng.randrange(len(ids) + 1)
            logs.append((log.branch(length), ids[:length]))
        elif action == 1:
            length = rng.randrange(len(ids) + 1)
            log.cut(length)
            del ids[length:]
        else:
            new = [rng.randrange(2**32) for _ in range(rng.randrange(4))]
            log.extend(new)
            ids.extend(new)
        count = rng.randrange(1, 9)
        assert log.tail(count) == tuple(ids[-count:])
    assert [log.to_list() for log, _ in logs] == [ids for _, ids in logs]


def test_token_costs_four_bytes_and_a_branch_nothing() -> None:
    """A hundred branches of a long prompt share one copy of it."""
    tracemalloc.start()
    try:
        log = TokenLog(range(100_000))
        branches = [log.branch() for _ in range(100)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(branches) == 100
    assert size < 4 * 100_000 * 1.2
