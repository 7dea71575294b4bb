"""How a new sequence is kept, as its request says; the sequence keeps what it needs of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class NewSequence:
    """How a sequence is kept that a request creates; of no meaning if the request names a sequence.

    Attributes:
        reserved_length: Tokens up to which room is reserved with it; 0: only what the request needs itself.
        reuse_prefix: Its prompt may be looked up in the prefix cache.
        publish_prefix: Later prompts of the principal may find its full blocks, and those of its forks, there.
        is_durable: It survives the process.
        attention_window: Tokens that a row attends to, if it and its forks give back blocks outside the window; 0: they
            keep all blocks. See ``kv/windows.py``.
        is_repeat_only: Create none: the request is answered only if it repeats a creation, else with DRAINING.
    """

    reserved_length: int = 0
    reuse_prefix: bool = True
    publish_prefix: bool = True
    is_durable: bool = False
    attention_window: int = 0
    is_repeat_only: bool = False


USUAL: Final = NewSequence()
"""What a request gets that says nothing."""
