"""TokenizerService: text to token ids and back, on threads of its own unless the text is short."""

from __future__ import annotations

import functools
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Final

from ferrule.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.chat import check_conversation, read_conversation
from ferrule_server.api.rpc.calls import Context
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.principal import principal_of
from ferrule_server.api.texts.queue import TextLane
from ferrule_server.api.texts.workers import TextWorkers
from ferrule_server.errors import FeatureUnsupported, InvalidRequest
from ferrule_server.quotas import TEXT_BYTES_PER_TOKEN

if TYPE_CHECKING:
    from ferrule_server.text.chat_template import ChatTemplate
    from ferrule_server.text.tokenizer import Tokenizer

_INLINE_LENGTH: Final = 1024
"""Texts and id lists up to this length take less time than a thread hop."""
_SLICE_LENGTH: Final = 65536
"""So many ids are copied into a message without letting other threads in."""
_TAIL_LENGTH: Final = 64
"""Among so many last tokens are those of a character that is not whole, skipped special ones between them included."""
_SHORT_TEXT_BYTES: Final = 128 << 10
"""Texts up to this size take a tenth of a second at most."""
_SHORT_CONVERSATION: Final = 64
_SHORT_CONVERSATION_BYTES: Final = 64 << 10
_NUM_LARGEST: Final = 16
"""So many texts of the largest size may wait and be worked on at a time."""


_BYTE_NS: Final = 100
"""What a byte of text counts in the shares of principals: it takes 450 ns to encode, a twelfth of that in the
interpreter, and a quarter of a token 100 ns to decode, half of it in the interpreter."""
_TEXT_NS: Final = 200_000
"""What each text counts besides its bytes: two changes of threads."""


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves the tokenizer of the loaded model. Whatever a request exceeds is found before it waits for a thread.

    Args:
        state: The server.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._workers = TextWorkers(state.limits_of, _NUM_LARGEST * _largest_bytes(state.limits), charge=self._charge)

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: Context) -> tokenizer_pb2.EncodeResponse:
        """Turn text into token ids."""
        codec, principal = self._codec(), principal_of(context)
        num_bytes = _num_bytes(request.text, self.state.limits.max_text_bytes)
        if num_bytes <= _INLINE_LENGTH:
            self._workers.spend(principal, num_bytes)
            return _encoded(codec, request)
        work = functools.partial(_encoded, codec, request)
        return await self._workers.run(principal, _lane_of_text(num_bytes), num_bytes, work)

    async def Decode(
        self, request: tokenizer_pb2.TokenizerServiceDecodeRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
        """Turn token ids into text."""
        codec, principal = self._codec(), principal_of(context)
        num_tokens, limit = len(request.token_ids), self.state.limits.max_text_tokens
        if num_tokens > limit:
            raise InvalidRequest("token_ids", f"has {num_tokens} entries, the limit is {limit}; send them in pieces")
        num_bytes = TEXT_BYTES_PER_TOKEN * num_tokens
        if num_tokens <= _INLINE_LENGTH:
            self._workers.spend(principal, num_bytes)
            return _decoded(codec, request)
        work = functools.partial(_decoded, codec, request)
        return await self._workers.run(principal, _lane_of_text(num_bytes), num_bytes, work)

    async def ApplyChatTemplate(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """Render a conversation; always on a thread, since a template may take long."""
        codec, template = self._codec(), self.state.use().chat_template
        if template is None:
            raise FeatureUnsupported("chat template", "the served model brings none; send the text of a prompt")
        num_bytes = check_conversation(request, self.state.limits.max_text_bytes)
        is_short = len(request.messages) <= _SHORT_CONVERSATION and num_bytes <= _SHORT_CONVERSATION_BYTES
        lane = TextLane.CHAT if is_short else TextLane.LONG
        work = functools.partial(_rendered, codec, template, request)
        return await self._workers.run(principal_of(context), lane, num_bytes, work)

    def _charge(self, principal: str, num_bytes: int) -> None:
        """Count work on a thread that takes the interpreter, or another core, from steps of other principals."""
        self.state.shares.charge(principal, _BYTE_NS * num_bytes + _TEXT_NS)

    def _codec(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            FeatureUnsupported: The model has none.
        """
        codec = self.state.use().tokenizer
        if codec is None:
            raise FeatureUnsupported("tokenizer", "the served model has no tokenizer; send token ids")
        return codec


def _largest_bytes(limits: ApiLimits) -> int:
    """Return the bytes of the largest text that is accepted, as the queue counts them."""
    return max(limits.max_text_bytes, TEXT_BYTES_PER_TOKEN * limits.max_text_tokens)


def _lane_of_text(num_bytes: int) -> TextLane:
    return TextLane.SHORT if num_bytes <= _SHORT_TEXT_BYTES else TextLane.LONG


def _num_bytes(text: str, limit: int) -> int:
    """Return the length of a text in UTF-8.

    Raises:
        InvalidRequest: It is longer than the limit. A text with more characters than that is not encoded to find out.
    """
    num_bytes = len(text) if len(text) > limit else len(text.encode())
    if num_bytes > limit:
        at_least = "at least " if num_bytes == len(text) else ""
        raise InvalidRequest("text", f"has {at_least}{num_bytes} bytes, the limit is {limit}; send it in pieces")
    return num_bytes


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
    codec: Tokenizer, template: ChatTemplate, request: tokenizer_pb2.ApplyChatTemplateRequest
) -> tokenizer_pb2.ApplyChatTemplateResponse:
    text = template.render(read_conversation(request))
    response = tokenizer_pb2.ApplyChatTemplateResponse(text=text)
    _extend(response.token_ids, codec.encode(text))
    return response
