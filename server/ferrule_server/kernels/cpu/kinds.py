"""The kinds of stages.

A new one is a number here, what it does (``rows``, or what ``linear`` does with outputs), and an entry in the list of a
model (``executor.cpu.stages``).
"""

from __future__ import annotations

from enum import IntEnum


class Rows(IntEnum):
    """Of what the rows of a stage are."""

    TOKENS = 0
    """The rows of the step."""
    OUTPUTS = 1
    """Those of which the head computes logits."""
    PAIRS = 2
    """Pairs of a row and an expert that it passes, in the order of experts (``experts``)."""
    ALL = 3
    """There is one, which stands for the whole step."""


class Kind(IntEnum):
    """What a stage does."""

    # Stages whose rows are shared out to the threads (``rows``).
    EMBED = 0
    """Token ids become the residual stream, positions become rotations."""
    NORM = 1
    """The residual stream, normed by its mean square, becomes the inputs of linear layers."""
    LAYER_NORM = 2
    """The same after its mean has been subtracted."""
    COPY = 3
    """The same, not normed."""
    QUANTISE = 4
    """Inputs of a linear layer become integers."""
    NORM_HEADS = 5
    """All query heads of a row are normed together, and all key heads; then they are finished as by ``PROJECT``."""
    ADD_NORMED = 6
    """What ``KEEP`` has kept is normed and added to the residual stream."""
    SCALE = 7
    """The residual stream is multiplied by a number."""
    MIX_INPUTS = 8
    """What ``KEEP`` has kept is normed, and the second embedding is added."""
    CLEAR_OUTPUT = 9
    """No logits of an output have been seen yet."""
    MERGE_OUTPUT = 10
    """What the threads have kept of an output becomes its results."""

    ROUTE = 11
    """The scores of experts become those that a row passes, and their weights."""
    GROUP_PAIRS = 12
    """Pairs of rows and experts are sorted by experts."""
    GATHER = 13
    """The inputs of a pair are copied from its row."""
    ADD_EXPERTS = 14
    """What ``KEEP`` has kept of the pairs of a row is weighted and added to the residual stream."""
    GATE_SHARED = 15
    """The inputs of the last layer are multiplied by the sigmoid of what ``KEEP`` has kept."""

    # Linear layers, by what becomes of their outputs (``linear``).
    PROJECT = 20
    """Heads: normed, rotated, scaled; keys and values go to the pool."""
    KEEP_HEADS = 21
    """The same, but queries and keys wait for ``NORM_HEADS``."""
    ADD = 22
    """Added to the residual stream."""
    KEEP = 23
    """Kept as they are, for a stage that follows."""
    ACTIVATE = 24
    """activation(gate) * up, or activation(up)."""
    GATE = 25
    """activation(gate) * what was kept."""
    READ_LOGITS = 26
    """Logits, and what outputs need of them."""

    # Attention (``attention``).
    ATTEND = 40
    """Tasks of attention; some leave partials."""
    MERGE = 41
    """Partials are merged, if there are any."""

    CHOOSE = 42
    """Tokens are chosen from whole rows of logits, if any are (``choice``); the last stage."""
