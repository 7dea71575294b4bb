"""Reads token masks in the three forms of the contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ferrule.v1 import policy_pb2
from ferrule_server.api.requests.fields import id_array
from ferrule_server.engine.masks import MaskRegistry, make_mask
from ferrule_server.errors import InvalidRequest
from ferrule_server.executor.base import TokenMask


class MaskReader:
    """Turns masks of requests into masks for the executor.

    Args:
        vocab_size: Number of token ids of the model.
        registry: Holds the masks that are named by fingerprint.
    """

    def __init__(self, vocab_size: int, registry: MaskRegistry) -> None:
        self._vocab_size = vocab_size
        self._num_bytes = -(-vocab_size // 8)
        self.registry = registry

    def read(self, message: policy_pb2.TokenMask, path: str, principal: str) -> TokenMask:
        """Return the mask of a message.

        Raises:
            InvalidRequest: No form is set, the size is wrong, or the mask allows no token.
            TokenOutOfVocab: An id is not in the vocabulary.
            MaskUnknown: The principal has no mask with this fingerprint.
        """
        form = message.WhichOneof("mask")
        if form == "fingerprint":
            return self.registry.find(principal, message.fingerprint)
        if form == "inline_bits":
            return self.packed(message.inline_bits, f"{path}.inline_bits")
        if form == "allowed_ids":
            return self._listed(message.allowed_ids.token_ids, f"{path}.allowed_ids.token_ids")
        raise InvalidRequest(path, "one of inline_bits, allowed_ids and fingerprint must be set")

    def packed(self, data: bytes, path: str) -> TokenMask:
        """Return the mask of packed bits, one for each token.

        Raises:
            InvalidRequest: The size is wrong, or no bit of the vocabulary is set.
        """
        if len(data) != self._num_bytes:
            raise InvalidRequest(
                path, f"has {len(data)} bytes, {self._vocab_size} tokens need {self._num_bytes}: one bit for each"
            )
        return self._mask(np.frombuffer(data, np.uint8), path)

    def _listed(self, token_ids: Sequence[int], path: str) -> TokenMask:
        if len(token_ids) > self._vocab_size:
            raise InvalidRequest(path, f"has {len(token_ids)} entries, the vocabulary has {self._vocab_size} tokens")
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[id_array(token_ids, self._vocab_size, path)] = True
        return self._mask(np.packbits(allowed, bitorder="little"), path)

    def _mask(self, bits: npt.NDArray[np.uint8], path: str) -> TokenMask:
        mask = make_mask(bits, self._vocab_size)
        if mask is None:
            raise InvalidRequest(path, "allows no token")
        return mask
