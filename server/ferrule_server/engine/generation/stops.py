"""Stops: the conditions that end a branch of Generate, checked token by token."""

from __future__ import annotations

from ferrule_server.engine.jobs import Finish, StopRules, packed_ids


class StopCheck:
    """Checks each token of one branch against its stop rules, in order."""

    __slots__ = ("_drawn", "_eos_ids", "_num_left", "_sequences", "_text", "_token_ids")

    def __init__(self, rules: StopRules) -> None:
        self._eos_ids = rules.eos_ids
        self._token_ids = rules.token_ids
        self._num_left = rules.max_tokens or -1  # negative: no limit
        self._text = None if rules.new_text_stop is None else rules.new_text_stop()
        self._drawn = b""  # newest byte first, as far back as the longest sequence reaches
        self._sequences = rules.suffixes

    @property
    def is_next_last(self) -> bool:
        """Whether the next token ends the branch, whichever it is."""
        return self._num_left == 1

    def after(self, token_id: int) -> Finish | None:
        """Take the next token, and return why the branch ends with it, None if it continues."""
        self._num_left -= 1
        if token_id in self._eos_ids:
            return Finish.EOS
        if token_id in self._token_ids:
            return Finish.STOP_TOKEN
        if self._sequences.longest and self._completes_a_sequence(token_id):
            return Finish.STOP_SEQUENCE
        if self._text is not None and self._text.feed(token_id):
            return Finish.STOP_SEQUENCE
        return None if self._num_left else Finish.MAX_TOKENS

    def _completes_a_sequence(self, token_id: int) -> bool:
        drawn = packed_ids((token_id,))[::-1] + self._drawn
        self._drawn = drawn[: self._sequences.longest]
        return self._sequences.is_at(drawn)
