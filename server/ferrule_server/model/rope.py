"""Rotary positions: which pairs of a head turn, at which frequency, and how long contexts scale that.

Inside the server the pairs of a head are (i, i + head_dim / 2), the rotated ones first. :func:`stored_order` says where
a checkpoint keeps them, and the loader orders the rows of queries and keys so; the scores do not change by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a configuration is read without torch, which takes seconds to import
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides every frequency ("Extending Context Window of Large Language Models via Position Interpolation", 2023).

    Attributes:
        factor: The divisor.
    """

    factor: float

    def scaled(self, frequencies: Tensor, _rope: Rope) -> Tensor:
        """Return the radians per position of each rotated pair, given the plain ones."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 scales the rotary frequencies ("The Llama 3 Herd of Models", Grattafiori et al., 2024).

    Attributes:
        factor: Divides low frequencies.
        low_freq_factor: Wavelengths above ``original_max_positions / low_freq_factor`` are low frequencies.
        high_freq_factor: Wavelengths below ``original_max_positions / high_freq_factor`` are not scaled.
        original_max_positions: Context length in tokens before the scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def scaled(self, frequencies: Tensor, _rope: Rope) -> Tensor:
        """Divide low frequencies by the factor, keep high ones, and interpolate between them."""
        wavelengths = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = ((self.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: frequencies of few rotations are divided ("YaRN: Efficient Context Window Extension", Peng et al., 2023).

    Attributes:
        factor: Divides low frequencies.
        original_max_positions: Context length in tokens before the scaling.
        magnitude: Multiplies cosine and sine.
        beta_fast: Pairs with more rotations than this within the original context are not scaled.
        beta_slow: Pairs with fewer are divided by ``factor``; between the two it is interpolated.
        is_truncated: The bounds of the interpolation are rounded to whole pairs.
    """

    factor: float
    original_max_positions: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True

    def scaled(self, frequencies: Tensor, rope: Rope) -> Tensor:
        """Divide the frequencies of pairs with few rotations, keep those of many, and interpolate between them."""
        low, high = (self._pair_of(beta, rope) for beta in (self.beta_fast, self.beta_slow))
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.width - 1)
        ramp = (frequencies.new_tensor(range(rope.num_pairs)) - low) / (high - low if high != low else 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return frequencies / self.factor * (1 - kept) + frequencies * kept

    def _pair_of(self, num_rotations: float, rope: Rope) -> float:
        """Return the pair that makes so many rotations within the original context, a fraction between pairs."""
        wavelength = self.original_max_positions / (num_rotations * 2 * math.pi)
        return rope.width * math.log(wavelength) / (2 * math.log(rope.theta))


@dataclass(frozen=True, slots=True)
class LongScaling:
    """One divisor for each pair, of which there are two lists ("LongRoPE", Ding et al., 2024).

    Attributes:
        short_factors: Divisors if no sequence can be longer than ``original_max_positions``.
        long_factors: Divisors otherwise. One server uses one list for all sequences, so that KV never depends on how
            long a sequence became later.
        original_max_positions: Context length in tokens before the scaling.
        magnitude: Multiplies cosine and sine.
        is_long: Which list is used.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    magnitude: float
    is_long: bool = True

    def scaled(self, frequencies: Tensor, _rope: Rope) -> Tensor:
        """Divide each frequency by its factor in the list that is used."""
        return frequencies / frequencies.new_tensor(self.long_factors if self.is_long else self.short_factors)


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of the queries and keys of a layer ("RoFormer", Su et al., 2021).

    Attributes:
        theta: Base of the frequencies: pair i turns by ``theta ** (-2 * i / width)`` radians per position.
        num_pairs: How many pairs of a head are rotated; the others stay.
        width: Of the frequencies: ``2 * num_pairs``, or head_dim if the slowest pairs of a whole head stay.
        scaling: For long contexts; None: plain.
        is_interleaved: The checkpoint keeps a pair in neighbouring rows, not in the two halves of the rotated part.
    """

    theta: float
    num_pairs: int
    width: int
    scaling: Scaling | None = None
    is_interleaved: bool = False

    @property
    def magnitude(self) -> float:
        """What multiplies cosine and sine of the rotated pairs."""
        return self.scaling.magnitude if isinstance(self.scaling, YarnScaling | LongScaling) else 1.0


def rotation_table(rope: Rope | None, head_dim: int) -> Tensor:
    """Return how each pair of a head turns: float32 [2, head_dim / 2], on the CPU.

    The first row has the radians per position, 0 for a pair that stays; the second one what multiplies cosine and sine,
    1 for a pair that stays.
    """
    import torch

    frequencies, magnitudes = torch.zeros(head_dim // 2), torch.ones(head_dim // 2)
    if rope is not None:
        exponents = torch.arange(0, 2 * rope.num_pairs, 2, dtype=torch.float32) / rope.width
        plain = 1.0 / (rope.theta**exponents)
        frequencies[: rope.num_pairs] = plain if rope.scaling is None else rope.scaling.scaled(plain, rope)
        magnitudes[: rope.num_pairs] = rope.magnitude
    return torch.stack((frequencies, magnitudes))


def stored_order(rope: Rope | None, head_dim: int) -> list[int] | None:
    """Return the row in the checkpoint of each row of a head inside the server; None if they are the same."""
    if rope is None or (not rope.is_interleaved and rope.width == head_dim):
        return None
    num_rotated, pairs = 2 * rope.num_pairs, range(rope.num_pairs)
    firsts = [2 * pair if rope.is_interleaved else pair for pair in pairs]
    seconds = [2 * pair + 1 if rope.is_interleaved else pair + rope.num_pairs for pair in pairs]
    middle = (num_rotated + head_dim) // 2
    return [*firsts, *range(num_rotated, middle), *seconds, *range(middle, head_dim)]
