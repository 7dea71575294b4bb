"""Stops: which token ends a branch, and what is said of it."""

from __future__ import annotations

import random

import pytest

from ferrule_server.engine.generation.stops import StopCheck
from ferrule_server.engine.jobs import Finish, StopRules


def finish_of(rules: StopRules, *token_ids: int) -> tuple[int, Finish | None]:
    """Feed tokens until the branch ends; returns how many were taken and why it ended."""
    stops = StopCheck(rules)
    for count, token_id in enumerate(token_ids, 1):
        if (finish := stops.after(token_id)) is not None:
            return count, finish
    return len(token_ids), None


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (StopRules(), (5, None)),
        (StopRules(max_tokens=3), (3, Finish.MAX_TOKENS)),
        (StopRules(eos_ids=frozenset({3})), (3, Finish.EOS)),
        (StopRules(token_ids=frozenset({2})), (2, Finish.STOP_TOKEN)),
        (StopRules(sequences=((2, 3), (9,))), (3, Finish.STOP_SEQUENCE)),
        (StopRules(sequences=((4, 5), (3, 4, 5))), (5, Finish.STOP_SEQUENCE)),
        (StopRules(sequences=((3, 2), (1, 3))), (5, None)),
        (StopRules(sequences=((0, 1, 2, 3, 4, 5),)), (5, None)),
    ],
)
def test_a_branch_ends_with_the_first_token_that_a_rule_names(
    rules: StopRules, expected: tuple[int, Finish | None]
) -> None:
    """Each rule alone, over the tokens 1 to 5."""
    assert finish_of(rules, 1, 2, 3, 4, 5) == expected


def test_of_several_reasons_the_models_own_comes_first_and_the_limit_last() -> None:
    """One token may be everything at once."""
    everything = StopRules(1, frozenset({7}), frozenset({7}), ((7,),))
    assert finish_of(everything, 7) == (1, Finish.EOS)
    assert finish_of(StopRules(1, frozenset(), frozenset({7}), ((7,),)), 7) == (1, Finish.STOP_TOKEN)
    assert finish_of(StopRules(1, sequences=((7,),)), 7) == (1, Finish.STOP_SEQUENCE)
    assert finish_of(StopRules(1), 7) == (1, Finish.MAX_TOKENS)


def test_a_sequence_is_found_wherever_it_lies() -> None:
    """Against a plain search, over random tokens of a tiny vocabulary, long after the memory of drawn ones was cut."""
    chance = random.Random(3)
    for _ in range(300):
        tokens = [chance.randrange(3) for _ in range(chance.randrange(1, 60))]
        sequences = tuple(
            tuple(chance.randrange(3) for _ in range(chance.randrange(1, 7))) for _ in range(chance.randrange(1, 4))
        )
        ends = [end for end in range(1, len(tokens) + 1) if any(_ends_with(tokens[:end], each) for each in sequences)]
        expected = (ends[0], Finish.STOP_SEQUENCE) if ends else (len(tokens), None)
        assert finish_of(StopRules(sequences=sequences), *tokens) == expected


def test_text_is_looked_at_for_each_branch_by_itself() -> None:
    """The finder of stop strings is made anew for every branch."""

    class Third:
        def __init__(self) -> None:
            self.count = 0

        def feed(self, token_id: int) -> bool:
            self.count += 1
            return self.count == 3

    rules = StopRules(new_text_stop=Third)
    for _ in range(2):
        assert finish_of(rules, 5, 5, 5, 5) == (3, Finish.STOP_SEQUENCE)


def _ends_with(tokens: list[int], sequence: tuple[int, ...]) -> bool:
    return tuple(tokens[-len(sequence) :]) == sequence
