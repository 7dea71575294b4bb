"""Reads what changes the logits before a token is chosen: penalties, bias, mask."""

from __future__ import annotations

from collections.abc import Mapping

from ferrule.v1 import policy_pb2
from ferrule_server.api.mask_inputs import MaskReader
from ferrule_server.api.numbers import FINITE, POSITIVE, number
from ferrule_server.errors import InvalidRequest, TokenOutOfVocab
from ferrule_server.executor.base import Shaping, TokenMask


class ShapingReader:
    """Turns the shaping part of a selection into a :class:`Shaping`, None where nothing is changed.

    Args:
        vocab_size: Token ids of the model.
        max_logit_biases: Most entries of ``logit_bias``.
        masks: Reads masks.
    """

    def __init__(self, vocab_size: int, max_logit_biases: int, masks: MaskReader) -> None:
        self._vocab_size = vocab_size
        self._max_logit_biases = max_logit_biases
        self._masks = masks

    def greedy(self, message: policy_pb2.GreedyArgmax, path: str, principal: str) -> Shaping | None:
        """Return what a greedy choice changes.

        Raises:
            InvalidRequest: A value is out of its range.
            TokenOutOfVocab: The mask names a token that is not in the vocabulary.
            MaskUnknown: The mask is not registered.
        """
        return _shaping(
            Shaping(
                repetition_penalty=number(message, "repetition_penalty", path, POSITIVE, 1.0),
                penalty_start=message.penalty_start,
                mask=self._mask(message, path, principal),
            )
        )

    def sample(self, message: policy_pb2.Sample, path: str, principal: str) -> Shaping | None:
        """Return what a drawn choice changes. Raises as :meth:`greedy`."""
        return _shaping(
            Shaping(
                repetition_penalty=number(message, "repetition_penalty", path, POSITIVE, 1.0),
                frequency_penalty=number(message, "frequency_penalty", path, FINITE, 0.0),
                presence_penalty=number(message, "presence_penalty", path, FINITE, 0.0),
                penalty_start=message.penalty_start,
                bias=self._bias(message.logit_bias, f"{path}.logit_bias") if message.logit_bias else (),
                mask=self._mask(message, path, principal),
            )
        )

    def _mask(
        self, message: policy_pb2.GreedyArgmax | policy_pb2.Sample, path: str, principal: str
    ) -> TokenMask | None:
        if not message.HasField("token_mask"):
            return None
        return self._masks.read(message.token_mask, f"{path}.token_mask", principal)

    def _bias(self, biases: Mapping[int, float], path: str) -> tuple[tuple[int, float], ...]:
        if len(biases) > self._max_logit_biases:
            raise InvalidRequest(path, f"has {len(biases)} entries, the limit is {self._max_logit_biases}")
        for token_id, bias in biases.items():
            if token_id >= self._vocab_size:
                raise TokenOutOfVocab(f"{path}[{token_id}]", token_id, self._vocab_size)
            if not FINITE.holds(bias):
                raise InvalidRequest(f"{path}[{token_id}]", f"must be {FINITE.name}, got {bias}; a mask rules out")
        return tuple(sorted((token_id, bias) for token_id, bias in biases.items() if bias != 0.0))


def _shaping(shaping: Shaping) -> Shaping | None:
    """Return a shaping in its one form for what it does: None for nothing, ``penalty_start`` only with penalties."""
    if shaping.has_penalties:
        return shaping
    if not shaping.bias and shaping.mask is None:
        return None
    return Shaping(bias=shaping.bias, mask=shaping.mask)
