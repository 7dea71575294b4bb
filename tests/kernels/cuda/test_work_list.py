"""The attention work list: every split is done once, new tokens are written once, CTAs are evenly loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrule_server.kernels.cuda.work_list import (
    FIELDS,
    MAX_NEW,
    SEGMENT,
    SPLIT,
    WorkList,
    WorkListError,
    WorkLists,
    count_new_tokens,
    make_work_list,
    max_items,
    max_places,
)

Row = dict[str, int]


def step(kv_lens: list[int], rows: list[int] | None = None, new: list[int] | None = None) -> dict[str, Any]:
    """Return the arrays of a step; one new row per sequence if not said."""
    rows = rows or [1] * len(kv_lens)
    new = new if new is not None else rows
    positions = [np.arange(kv_len - count, kv_len) for kv_len, count in zip(kv_lens, rows, strict=True)]
    return {
        "cu_seqlens_q": np.cumsum([0, *rows]).astype(np.int32),
        "kv_lens": np.array(kv_lens, np.int32),
        "num_new": np.array(new, np.int32),
        "positions": np.concatenate(positions).astype(np.int32),
    }


def make(arrays: dict[str, Any], **settings: Any) -> WorkList:
    """Return the list for 2 KV heads, one row per tile and 12 CTAs unless said otherwise."""
    return make_work_list(**arrays, **{"num_kv_heads": 2, "rows_per_tile": 1, "num_ctas": 12, **settings})


def chains(work: WorkList) -> list[list[Row]]:
    """Return each CTA's items, as the kernels walk through them."""
    found = []
    for cta in range(work.num_ctas):
        chain, index = [], cta
        while True:
            item = dict(zip(FIELDS, work.items[index].tolist(), strict=True))
            chain += [item] if item["num_rows"] else []
            index = item["next"]
            if not index:
                break
        found.append(chain)
    return found


def leaves(item: Row) -> int:
    """Return how many partials the kernels' rule makes of an item."""
    count, begins = 0, False
    for split in range(item["first_split"], item["end_split"]):
        begins = split % SEGMENT == 0 or begins
        if not begins or (split + 1) % SEGMENT == 0 or split + 1 == item["end_split"]:
            count, begins = count + 1, False
    return count


def check_integrity(work: WorkList, arrays: dict[str, Any], *, rows_per_tile: int, is_tree: bool) -> None:
    """Assert what WorkList promises, and what the kernels rely on."""
    items = [item for chain in chains(work) for item in chain]
    assert len(items) == np.count_nonzero(work.items[:, FIELDS.index("num_rows")])
    written: set[tuple[int, int, int]] = set()
    places: list[int] = []
    for tile in range(work.num_tiles):
        own = sorted((item for item in items if item["tile"] == tile), key=lambda item: item["first_split"])
        seq, last = own[0]["seq"], own[-1]
        assert all(item["num_items"] == len(own) for item in own)
        assert [item["first_split"] for item in own] == [0, *(item["end_split"] for item in own[:-1])]
        end = int(arrays["positions"][last["first_row"] + last["num_rows"] - 1]) + 1
        is_whole = last["writes_new"] or is_tree
        end = int(arrays["kv_lens"][seq]) if is_whole else end
        assert last["end_split"] == -(-end // SPLIT)
        assert last["first_row"] + last["num_rows"] <= arrays["cu_seqlens_q"][seq + 1]
        assert last["num_rows"] <= rows_per_tile
        assert last["first_new_row"] == arrays["cu_seqlens_q"][seq + 1] - arrays["num_new"][seq]
        place = own[0]["tile_first_place"]
        assert own[0]["tile_num_partials"] == (sum(map(leaves, own)) if len(own) > 1 else 0)
        for item in own:
            assert item["first_place"] == place
            made = item["num_rows"] * leaves(item) if len(own) > 1 else 0
            places += range(place, place + made)
            place += made
            assert item["kv_len"] == arrays["kv_lens"][seq]
            for token in range(item["kv_len"] - item["num_new"], item["kv_len"]):
                if item["writes_new"] and item["first_split"] <= token // SPLIT < item["end_split"]:
                    assert (seq, item["kv_head"], token) not in written
                    written.add((seq, item["kv_head"], token))
    assert sorted(places) == list(range(work.num_places))
    assert len(written) == arrays["num_new"].sum() * 2


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("rows_per_tile", [1, 2, 4])
@pytest.mark.parametrize("num_ctas", [1, 5, 12, 132])
def test_every_split_and_every_new_token_is_done_once(num_ctas: int, rows_per_tile: int, is_tree: bool) -> None:
    """For random steps, sharing, order and partials are as promised and within the bounds."""
    random = np.random.default_rng(num_ctas * 10 + rows_per_tile)
    for longest in (100, 3000, 40000):
        num_seqs = int(random.integers(1, 12))
        rows = random.integers(1, 9, num_seqs)
        new = random.integers(0, rows + 1)
        kv_lens = rows + random.integers(0, longest, num_seqs)
        arrays = step(kv_lens.tolist(), rows.tolist(), new.tolist())
        work = make(arrays, num_ctas=num_ctas, rows_per_tile=rows_per_tile, is_tree=is_tree)
        check_integrity(work, arrays, rows_per_tile=rows_per_tile, is_tree=is_tree)
        assert len(work.items) <= max_items(work.num_tiles, num_ctas)
        assert work.num_places <= max_places(work.num_tiles, num_ctas, int(kv_lens.max()), rows_per_tile=rows_per_tile)


@pytest.mark.parametrize(
    ("kv_lens", "most"),
    [
        pytest.param([2048] * 8, 1.05, id="batch-8"),
        pytest.param([20000], 1.1, id="one-long"),
        pytest.param([100] * 7 + [30000], 1.15, id="one-long-among-short"),
        pytest.param(list(range(1, 4000, 31)), 1.1, id="batch-128"),
        pytest.param([131072] * 2, 1.05, id="longest"),
    ],
)
def test_ctas_are_evenly_loaded(kv_lens: list[int], most: float) -> None:
    """The busiest of 132 CTAs has little more than the average."""
    work = make(step(kv_lens), num_kv_heads=8, num_ctas=132)
    loads = [sum(item["end_split"] - item["first_split"] for item in chain) for chain in chains(work)]
    assert max(loads) <= most * sum(loads) / len(loads) + 1


def test_short_sequences_are_left_whole() -> None:
    """A sequence of at most a segment is never shared where there are enough others."""
    work = make(step([300] * 40), num_kv_heads=8, num_ctas=132)
    assert work.num_places == 0


def test_sequences_are_left_whole_where_partials_would_not_fit() -> None:
    """The capacity for partials bounds what is cut."""
    arrays = step([9000, 300, 20000])
    assert make(arrays).num_places > 20
    work = make(arrays, num_places=20)
    assert work.num_places == 0
    check_integrity(work, arrays, rows_per_tile=1, is_tree=False)


def test_a_sequence_without_rows_gets_no_item() -> None:
    """A sequence may stand in a step as nothing but its KV."""
    arrays = step([50, 20], [0, 1], [0, 1])
    assert [item["seq"] for chain in chains(make(arrays)) for item in chain] == [1, 1]


def test_new_tokens_are_counted_by_their_slots() -> None:
    """Only trailing rows of a sequence may be new."""
    slots, begins = np.array([-1, 5, 6, -1, -1, 7], np.int32), np.array([0, 3, 5, 6], np.int32)
    assert count_new_tokens(slots, begins).tolist() == [2, 0, 1]


def test_a_row_with_a_slot_before_one_without_is_refused() -> None:
    """The kernels take the K and V of the last rows from the projection, all others from the pool."""
    with pytest.raises(WorkListError, match="row 2"):
        count_new_tokens(np.array([4, 5, -1], np.int32), np.array([0, 3], np.int32))


def test_more_new_tokens_than_shared_memory_holds_are_refused() -> None:
    """Their number is bounded; longer prompts go through several steps."""
    rows = MAX_NEW + 1
    with pytest.raises(WorkListError, match="sequence 0 brings 65"):
        make(step([100], [rows], [rows]))
    with pytest.raises(WorkListError, match="sequence 0 brings 65"):
        count_new_tokens(np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32))


@pytest.mark.parametrize("num_seqs", [0, 2])
def test_a_step_without_rows_is_a_list_without_work(num_seqs: int) -> None:
    """The kernel runs in the captured step all the same."""
    none = np.zeros(num_seqs, np.int32)
    work = make_work_list(
        cu_seqlens_q=np.zeros(num_seqs + 1, np.int32),
        kv_lens=none + 5,
        num_new=none,
        positions=np.zeros(0, np.int32),
        num_kv_heads=2,
        rows_per_tile=1,
        num_ctas=3,
    )
    assert not work.items.any()
    assert work.items.shape == (3, len(FIELDS))
    assert (work.num_tiles, work.num_places) == (0, 0)


@pytest.mark.parametrize(("seed", "split"), [(0, SPLIT), (1, 64), (2, SPLIT), (3, SPLIT)])
def test_lists_of_decode_steps_are_those_made_anew(seed: int, split: int) -> None:
    """Over steps in which sequences grow by a token, come, go and are read again, whether the last list does or not."""
    rng = np.random.default_rng(seed)
    lists = WorkLists(num_kv_heads=2, rows_per_tile=3, num_ctas=12, num_places=20, split=split)
    kv_lens = rng.integers(1, 5 * SPLIT, 1 + 6 * (seed % 3)).astype(np.int32)
    for number in range(400):
        kv_lens += 1
        if number % 37 == 36:
            kv_lens = rng.permutation(np.append(kv_lens[1:], rng.integers(1, 3 * SPLIT, 2))).astype(np.int32)
        has_slot = rng.random(len(kv_lens)) < (0.5 if number % 11 == 0 else 1.0)
        arrays = step(kv_lens.tolist(), new=has_slot.astype(int).tolist())
        expected = make(arrays, num_places=20, split=split).items
        slots = np.where(has_slot, 5, -1).astype(np.int32)
        found = lists.items(arrays["cu_seqlens_q"], kv_lens, slots, arrays["positions"])
        np.testing.assert_array_equal(found, expected, str(number))
        if number % 50 == 49:  # a step of another kind in between
            verify = step([40, 300], [2, 5])
            others = lists.items(
                verify["cu_seqlens_q"], verify["kv_lens"], np.arange(7, dtype=np.int32), verify["positions"]
            )
            np.testing.assert_array_equal(
                others, make(verify, num_places=20, rows_per_tile=3, split=split).items, str(number)
            )
