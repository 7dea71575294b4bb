"""Read the sizes of a mixture of experts."""

from __future__ import annotations

from ferrule_server.errors import ModelError
from ferrule_server.model.config import Experts
from ferrule_server.model.families.values import ConfigValues

_COUNTS = ("num_experts", "num_local_experts")
"""Two names of one setting: older and newer versions of transformers write one each."""
_MOST = 1 << 16
"""In all layers: each is a few tensors, which cost time and memory before a weight is read."""


def read_experts(values: ConfigValues, *, width: str) -> Experts:
    """Return the experts of a network.

    Args:
        values: Of config.json.
        width: The setting of the width inside an expert.

    Raises:
        ModelError: A size is missing or out of bounds, or two contradict each other.
    """
    found = {key: values.count(key) for key in _COUNTS if values.is_stated(key)}
    counts = {*found.values()} or {values.count(_COUNTS[0])}
    if len(counts) > 1:
        raise ModelError(f"config.json: the number of experts is {found}, one number is expected")
    experts = Experts(counts.pop(), values.count("num_experts_per_tok"), values.count(width))
    if experts.count * values.count("num_hidden_layers") > _MOST:
        raise ModelError(f"config.json: {experts.count} experts a layer are more than {_MOST} in all, the most")
    if experts.used > experts.count:
        raise ModelError(f"config.json: num_experts_per_tok is {experts.used} of {experts.count} experts")
    return experts
