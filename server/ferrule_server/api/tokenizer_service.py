"""TokenizerService: text to token ids and back, off the event loop where the text is long."""

from __future__ import annotations

import asyncio
from typing import Final

from ferrule.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_server.api.calls import Context, not_served, unary
from ferrule_server.api.state import ServerState, TextCodec
from ferrule_server.errors import FeatureUnsupported

_INLINE_LENGTH: Final = 1024
"""Texts and id lists up to this length take less time than a thread hop."""


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves the tokenizer of the loaded model.

    Args:
        state: The server.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state

    @unary
    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: Context) -> tokenizer_pb2.EncodeResponse:
        """Turn text into token ids."""
        codec = self._codec()
        is_parsing = request.parse_special_tokens if request.HasField("parse_special_tokens") else True
        arguments = (request.text, request.add_special_tokens, is_parsing)
        if len(request.text) <= _INLINE_LENGTH:
            token_ids = codec.encode(*arguments)
        else:
            token_ids = await asyncio.to_thread(codec.encode, *arguments)
        return tokenizer_pb2.EncodeResponse(token_ids=token_ids)

    @unary
    async def Decode(
        self, request: tokenizer_pb2.TokenizerServiceDecodeRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
        """Turn token ids into text."""
        codec = self._codec()
        token_ids = list(request.token_ids)
        if len(token_ids) <= _INLINE_LENGTH:
            text = codec.decode(token_ids, request.skip_special_tokens)
        else:
            text = await asyncio.to_thread(codec.decode, token_ids, request.skip_special_tokens)
        return tokenizer_pb2.TokenizerServiceDecodeResponse(
            text=text, ends_mid_character=codec.ends_mid_character(token_ids)
        )

    ApplyChatTemplate = not_served("ApplyChatTemplate")

    def _codec(self) -> TextCodec:
        """Return the tokenizer.

        Raises:
            FeatureUnsupported: The model has none.
        """
        codec = self.state.use().tokenizer
        if codec is None:
            raise FeatureUnsupported("tokenizer", "the served model has no tokenizer; send token ids")
        return codec
