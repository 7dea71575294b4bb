"""TokenizerService: text to token ids and back, off the event loop where the text is long."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from ferrule.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_server.api.calls import Context, unary
from ferrule_server.api.chat_inputs import read_conversation
from ferrule_server.api.state import ServerState
from ferrule_server.errors import FeatureUnsupported, InvalidRequest

if TYPE_CHECKING:
    from ferrule_server.text.chat_template import ChatTemplate
    from ferrule_server.text.tokenizer import Tokenizer

_Response = TypeVar("_Response")

_INLINE_LENGTH: Final = 1024
"""Texts and id lists up to this length take less time than a thread hop."""
_SLICE_LENGTH: Final = 65536
"""So many ids are copied into a message without letting other threads in."""
_TAIL_LENGTH: Final = 64
"""Among so many last tokens are those of a character that is not whole, skipped special ones between them included."""
_SHORT_CONVERSATION: Final = 64
_SHORT_BYTES: Final = 64 << 10


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves the tokenizer of the loaded model.

    Args:
        state: The server.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state
        # One thread for all that is long: text of 4 MiB takes half a GiB while it is encoded, which its thread keeps
        # for the next one, and rendering holds the interpreter, which the engine needs too.
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="ferrule-text")

    @unary
    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: Context) -> tokenizer_pb2.EncodeResponse:
        """Turn text into token ids."""
        codec = self._codec()
        if len(request.text) <= _INLINE_LENGTH:
            return _encoded(codec, request)
        num_bytes, limit = len(request.text.encode()), self.state.limits.max_text_bytes
        if num_bytes > limit:
            raise InvalidRequest("text", f"has {num_bytes} bytes, the limit is {limit}; send it in pieces")
        return await self._on_a_thread(num_bytes, functools.partial(_encoded, codec, request))

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

    @unary
    async def ApplyChatTemplate(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """Render a conversation; on a thread, since a template may take long, and long ones one at a time."""
        codec, template = self._codec(), self.state.use().chat_template
        if template is None:
            raise FeatureUnsupported("chat template", "the served model brings none; send the text of a prompt")
        rendered = functools.partial(_rendered, codec, template, request, self.state.limits.max_text_bytes)
        is_short = len(request.messages) <= _SHORT_CONVERSATION
        return await self._on_a_thread(request.ByteSize() if is_short else _SHORT_BYTES + 1, rendered)

    async def _on_a_thread(self, num_bytes: int, work: Callable[[], _Response]) -> _Response:
        """Return what comes of some work on so many bytes; what is long waits for its turn."""
        if num_bytes <= _SHORT_BYTES:
            return await asyncio.to_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._long_texts, work)

    def _codec(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            FeatureUnsupported: The model has none.
        """
        codec = self.state.use().tokenizer
        if codec is None:
            raise FeatureUnsupported("tokenizer", "the served model has no tokenizer; send token ids")
        return codec


def _encoded(codec: Tokenizer, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
    is_parsing = request.parse_special_tokens if request.HasField("parse_special_tokens") else True
    token_ids = codec.encode(request.text, request.add_special_tokens, is_parsing)
    response = tokenizer_pb2.EncodeResponse()
    _extend(response.token_ids, token_ids)
    return response


def _extend(field: MutableSequence[int], token_ids: Sequence[int]) -> None:
    for start in range(0, len(token_ids), _SLICE_LENGTH):
        field.extend(token_ids[start : start + _SLICE_LENGTH])


def _decoded(
    codec: Tokenizer, request: tokenizer_pb2.TokenizerServiceDecodeRequest
) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
    token_ids = list(request.token_ids)
    text = codec.decode(token_ids, request.skip_special_tokens)
    last = list(codec.shown(token_ids[-_TAIL_LENGTH:], request.skip_special_tokens))
    return tokenizer_pb2.TokenizerServiceDecodeResponse(text=text, ends_mid_character=codec.ends_mid_character(last))


def _rendered(
    codec: Tokenizer, template: ChatTemplate, request: tokenizer_pb2.ApplyChatTemplateRequest, max_bytes: int
) -> tokenizer_pb2.ApplyChatTemplateResponse:
    text = template.render(read_conversation(request, max_bytes))
    response = tokenizer_pb2.ApplyChatTemplateResponse(text=text)
    _extend(response.token_ids, codec.encode(text))
    return response
