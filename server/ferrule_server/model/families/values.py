"""Read the values of config.json, which strangers write: each is checked, and sizes are bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model_files import shown

# Far beyond any model of these families. Loading takes time and memory in proportion to these sizes before a single
# weight is read, so the folder of a stranger must not choose them freely.
_MOST: Final = {
    "vocab_size": 1 << 22,
    "vocab_size_per_layer_input": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "num_experts_per_tok": 64,
    "max_position_embeddings": 1 << 27,
    "original_max_position_embeddings": 1 << 27,
    "max_window_layers": 1 << 27,
    "sliding_window": 1 << 27,
}
_MOST_ELSE = 1 << 20
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30  # float32 holds these and what is computed from them


class ConfigValues:
    """The values of one JSON object of config.json, and the defaults for absent keys.

    Args:
        raw: The parsed object.
        defaults: The value of a key that is absent; the methods that return a type also use it for null.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._raw = raw
        self._defaults = defaults

    def get(self, key: str) -> Any:
        """Return a value as it is written; the default only where the key is absent."""
        return self._raw.get(key, self._defaults.get(key))

    def count(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from ``least`` to the bound of its key. Every size of a configuration is read here.

        ``default`` is used if neither the file nor the defaults have a value.

        Raises:
            ModelError: It is missing, of another type, or out of bounds.
        """
        value = self._required(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"config.json: {key} is {shown(value)}, a whole number of at least {least} is expected")
        most = _MOST.get(key, _MOST_ELSE)
        if value > most:
            raise ModelError(f"config.json: {key} is {shown(value)}, at most {most} is supported")
        return value

    def number(self, key: str) -> float:
        """Return a positive number that float32 holds.

        Raises:
            ModelError: It is missing, of another type, or out of bounds.
        """
        value = self._required(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            limits = f"from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}"
            raise ModelError(f"config.json: {key} is {shown(value)}, a number {limits} is expected")
        return float(value)

    def number_or_zero(self, key: str) -> float:
        """Return a positive number as :meth:`number` does, or 0 for 0 and null."""
        return 0.0 if self.get(key) in (None, 0) else self.number(key)

    def flag(self, key: str) -> bool:
        """Return true or false; false if the family has no such setting.

        Raises:
            ModelError: It is of another type.
        """
        value = False if self.is_absent(key) else self._required(key)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} is {shown(value)}, true or false is expected")
        return value

    def has_default(self, key: str) -> bool:
        """Return whether the family has such a setting."""
        return key in self._defaults

    def is_stated(self, key: str) -> bool:
        """Return whether the file has a value."""
        return self._raw.get(key) is not None

    def is_absent(self, key: str) -> bool:
        """Return whether neither the file nor the defaults have a value."""
        return self._raw.get(key) is None and self._defaults.get(key) is None

    def _required(self, key: str, default: int | None = None) -> Any:
        for value in (self._raw.get(key), self._defaults.get(key), default):
            if value is not None:
                return value
        raise ModelError(f"config.json: {key} is missing")
