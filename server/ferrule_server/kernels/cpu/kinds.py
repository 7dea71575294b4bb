"""The kinds of stages.

A new one is a number here, what it does (``rows``, or what ``linear`` does with outputs), and an entry in the list of a
model (``executor.cpu.stages``).
"""

from __future__ import annotations

from enum import IntEnum


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
