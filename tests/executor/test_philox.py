"""Philox4x32-10 against the published vectors, and the one number each draw uses."""

from collections import Counter

import pytest

from ferrule_server.executor.sampling.philox import Purpose, Words, philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: Words, key: tuple[int, int], expected: Words) -> None:
    """The three vectors "philox4x32 10" of Random123's kat_vectors."""
    assert philox4x32(counter, key) == expected


def test_uniform_is_the_first_word_between_zero_and_one() -> None:
    """Key is the seed, low word first; the counter is (position, purpose, 0, 0)."""
    seed, position = 0x299F31D0_A4093822, 12345
    first = philox4x32((position, 2, 0, 0), (0xA4093822, 0x299F31D0))[0]
    assert uniform(seed, position, Purpose.ACCEPT) == (first + 0.5) / 2**32


def test_uniform_of_the_zero_seed_is_a_known_number() -> None:
    """A vector other languages can check: the first known answer as a uniform."""
    assert uniform(0, 0, Purpose.SAMPLE) == (0x6627E8D5 + 0.5) * 2.0**-32


def test_uniform_uses_all_64_bits_of_the_seed_and_the_low_32_of_the_position() -> None:
    """Seeds differ in any bit; positions 2^32 apart share a number."""
    draws = {uniform(1 << bit, 7, Purpose.SAMPLE) for bit in range(64)}
    assert len(draws) == 64
    assert uniform(5, 7, Purpose.SAMPLE) == uniform(5, 7 + 2**32, Purpose.SAMPLE)


def test_purposes_never_share_a_number() -> None:
    """Sampling, drafting, accepting and redrawing at one position are independent."""
    assert [int(purpose) for purpose in Purpose] == [0, 1, 2, 3]
    assert len({uniform(9, position, purpose) for position in range(100) for purpose in Purpose}) == 400


def test_uniform_fills_the_unit_interval_evenly() -> None:
    """Chi-square over 16 cells of 8000 draws stays below the 99.99 % quantile (44.3, 15 degrees of freedom)."""
    cells = Counter(int(16 * uniform(3, position, Purpose.SAMPLE)) for position in range(8000))
    assert sum((cells[cell] - 500) ** 2 / 500 for cell in range(16)) < 44.3
