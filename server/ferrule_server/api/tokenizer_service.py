"""TokenizerService: text to token ids and back, off the event loop where the text is long."""

from __future__ import annotations

import asyncio
from typing import Final

from ferrule.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_server.api.calls import Context, not_served, unary
from ferrule_server.api.state import ServerState, TextCodec
from ferrule_server.errors import FeatureUnsupported, InvalidRequest

_INLINE_LENGTH: Final = 1024
"""Texts and id lists up to this length take less time than a thread hop."""
_SLICE_LENGTH: Final = 65536
"""So many ids are copied into a message without letting other threads in."""


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
        if len(request.text) <= _INLINE_LENGTH:
            return _encoded(codec, request)
        num_bytes, limit = len(request.text.encode()), self.state.limits.max_text_bytes
        if num_bytes > limit:
            raise InvalidRequest("text", f"has {num_bytes} bytes, the limit is {limit}; send it in pieces")
        return await asyncio.to_thread(_encoded, codec, request)

    @unary
    async def Decode(
        self, request: tokenizer_pb2.TokenizerServiceDecodeRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
        """Turn token ids into text."""
        codec = self._codec()
        num_tokens, limit = len(request.token_ids), self.state.limits.max_text_tokens
        if num_tokens <= _INLINE_LENGTH:
            return _decoded(codec, request)
        if num_tokens > limit:
            raise InvalidRequest("token_ids", f"has {num_tokens} entries, the limit is {limit}; send them in pieces")
        return await asyncio.to_thread(_decoded, codec, request)

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


def _encoded(codec: TextCodec, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
    is_parsing = request.parse_special_tokens if request.HasField("parse_special_tokens") else True
    token_ids = codec.encode(request.text, request.add_special_tokens, is_parsing)
    response = tokenizer_pb2.EncodeResponse()
    for start in range(0, len(token_ids), _SLICE_LENGTH):
        response.token_ids.extend(token_ids[start : start + _SLICE_LENGTH])
    return response


def _decoded(
    codec: TextCodec, request: tokenizer_pb2.TokenizerServiceDecodeRequest
) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
    token_ids = list(request.token_ids)
    text = codec.decode(token_ids, request.skip_special_tokens)
    return tokenizer_pb2.TokenizerServiceDecodeResponse(
        text=text, ends_mid_character=codec.ends_mid_character(token_ids)
    )
