"""TokenizerService: text to token ids and back, on separate threads unless the text is short."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, MutableSequence, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from ferrule.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_server.api.requests.chat import check_conversation, check_special_tokens, read_conversation
from ferrule_server.api.requests.fields import check_count
from ferrule_server.api.rpc.calls import Context
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.principal import principal_of
from ferrule_server.api.texts.queue import TextLane
from ferrule_server.api.texts.workers import TextWorkers
from ferrule_server.errors import FeatureUnsupported, InvalidRequest
from ferrule_server.quotas import TEXT_BYTES_PER_TOKEN
from ferrule_server.text.stand_ins import render_guarded

if TYPE_CHECKING:
    from ferrule_server.text.chat_template import ChatTemplate
    from ferrule_server.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

_INLINE_LENGTH: Final = 1024
"""Texts and lists of ids up to this length take less time than a change of threads."""
_SLICE_LENGTH: Final = 65536
"""Number of ids that are copied into a message at a time; other threads run in between."""
_TAIL_LENGTH: Final = 64
"""Number of last tokens that hold any incomplete character, with skipped special tokens between its tokens."""
_SHORT_TEXT_BYTES: Final = 128 << 10
"""Texts up to this size take at most a tenth of a second."""
_SHORT_CONVERSATION: Final = 64
_SHORT_CONVERSATION_BYTES: Final = 64 << 10
_NUM_LARGEST: Final = 16
"""Number of texts of the largest size that may wait or run at a time."""

_BYTE_NS: Final = 100
"""Cost of a byte of text in the shares of principals. Encoding takes 450 ns, a twelfth of it in the interpreter.
Decoding takes 100 ns, half of it in the interpreter; a byte is a quarter of a token."""
_TEXT_NS: Final = 200_000
"""Cost of each text besides its bytes: two changes of threads."""

_Response = TypeVar("_Response")


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves the tokenizer of the loaded model. A request beyond a limit is refused before it waits for a thread.

    Args:
        state: The server.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._has_warned_of_tools = False
        limits = state.limits
        largest_bytes = max(limits.max_text_bytes, TEXT_BYTES_PER_TOKEN * limits.max_text_tokens)
        self._workers = TextWorkers(state.limits_of, _NUM_LARGEST * largest_bytes, charge=self._charge)

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        """Turn text into token ids."""
        codec, num_bytes = self._codec(), _num_bytes(request.text, self.state.limits.max_text_bytes)
        work = functools.partial(_tokenized, codec, request)
        return await self._run(context, work, num_bytes, is_inline=num_bytes <= _INLINE_LENGTH)

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        """Turn token ids into text."""
        codec, num_tokens = self._codec(), len(request.token_ids)
        check_count("token_ids", num_tokens, self.state.limits.max_text_tokens, "send them in pieces")
        work = functools.partial(_detokenized, codec, request)
        return await self._run(context, work, TEXT_BYTES_PER_TOKEN * num_tokens, is_inline=num_tokens <= _INLINE_LENGTH)

    async def ApplyChatTemplate(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """Render a conversation, always on a thread, because a template may take long."""
        codec, template = self._codec(), self.state.use().chat_template
        if template is None:
            raise FeatureUnsupported("chat template", "the loaded model has no chat template; send a prompt")
        num_bytes = check_conversation(request, self.state.limits.max_text_bytes)
        is_short = len(request.messages) <= _SHORT_CONVERSATION and num_bytes <= _SHORT_CONVERSATION_BYTES
        lane = TextLane.CHAT if is_short else TextLane.LONG
        principal, work = principal_of(context), functools.partial(_rendered, codec, template, request)
        num_more = (not request.allow_special_tokens) + bool(request.tools_json)
        self._charge(principal, num_more * num_bytes)  # most are rendered again: render_guarded, and without tools
        response = await self._workers.run(principal, lane, num_bytes, work)
        if response.tools_ignored:
            self._warn_of_tools()
        return response

    def _warn_of_tools(self) -> None:
        """Log once that the chat template ignores tools; each reply says so too."""
        if not self._has_warned_of_tools:
            _LOG.warning("event=tools_ignored (the chat template does not use tools: describe them in a message)")
        self._has_warned_of_tools = True

    async def _run(
        self, context: Context, work: Callable[[], _Response], num_bytes: int, *, is_inline: bool
    ) -> _Response:
        """Return the result of ``work``, which runs on a thread unless ``is_inline``."""
        principal = principal_of(context)
        if is_inline:
            self._workers.spend(principal, num_bytes)
            return work()
        lane = TextLane.SHORT if num_bytes <= _SHORT_TEXT_BYTES else TextLane.LONG
        return await self._workers.run(principal, lane, num_bytes, work)

    def _charge(self, principal: str, num_bytes: int) -> None:
        """Charge work on a thread: it takes the interpreter or another core from the steps of other principals."""
        self.state.shares.charge(principal, _BYTE_NS * num_bytes + _TEXT_NS)

    def _codec(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            FeatureUnsupported: The model has no tokenizer.
        """
        codec = self.state.use().inputs.tokenizer
        if codec is None:
            raise FeatureUnsupported("tokenizer", "the loaded model has no tokenizer; send token ids")
        return codec


def _num_bytes(text: str, limit: int) -> int:
    """Return the length of a text in UTF-8.

    Raises:
        InvalidRequest: The text is longer than the limit. It is not encoded if it has more characters than that.
    """
    num_bytes = len(text) if len(text) > limit else len(text.encode())
    if num_bytes > limit:
        at_least = "at least " if num_bytes == len(text) else ""
        raise InvalidRequest("text", f"has {at_least}{num_bytes} bytes, the limit is {limit}; send it in pieces")
    return num_bytes


def _tokenized(codec: Tokenizer, request: tokenizer_pb2.TokenizeRequest) -> tokenizer_pb2.TokenizeResponse:
    if request.add_begin_tokens and not request.add_special_tokens:
        token_ids = codec.encode_prompt(request.text, request.parse_special_tokens)
    else:
        token_ids = codec.encode(request.text, request.add_special_tokens, request.parse_special_tokens)
    response = tokenizer_pb2.TokenizeResponse()
    _extend(response.token_ids, token_ids)
    return response


def _extend(field: MutableSequence[int], token_ids: Sequence[int]) -> None:
    for start in range(0, len(token_ids), _SLICE_LENGTH):
        field.extend(token_ids[start : start + _SLICE_LENGTH])


def _detokenized(codec: Tokenizer, request: tokenizer_pb2.DetokenizeRequest) -> tokenizer_pb2.DetokenizeResponse:
    token_ids = list(request.token_ids)
    text = codec.decode(token_ids, request.skip_special_tokens)
    last = list(codec.shown(token_ids[-_TAIL_LENGTH:], request.skip_special_tokens))
    return tokenizer_pb2.DetokenizeResponse(text=text, ends_mid_character=codec.num_incomplete(last) > 0)


def _rendered(
    codec: Tokenizer, template: ChatTemplate, request: tokenizer_pb2.ApplyChatTemplateRequest
) -> tokenizer_pb2.ApplyChatTemplateResponse:
    conversation, as_text = read_conversation(request), request.special_tokens_as_text
    if request.allow_special_tokens:
        text = template.render(conversation)
        token_ids = codec.encode(text)
    else:
        check = functools.partial(check_special_tokens, request, codec.find_control_token)
        text, token_ids = render_guarded(codec, template, conversation, None if as_text else check)
    ignored = template.ignores_tools(conversation, text)
    response = tokenizer_pb2.ApplyChatTemplateResponse(text=text, tools_ignored=ignored)
    _extend(response.token_ids, token_ids)
    return response
