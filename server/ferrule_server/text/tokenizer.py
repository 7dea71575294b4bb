"""Convert text to token ids and back, as the ``tokenizer.json`` of the model folder says."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from ferrule_server.errors import InvalidRequest, ModelError, TokenOutOfVocab
from ferrule_server.model_files import MAX_TOKENIZER_BYTES, FileMissing, name_of, shown
from ferrule_server.model_folder import read_text
from ferrule_server.text.control_tokens import ControlTokenFinder, control_tokens
from ferrule_server.text.growth import MAX_BYTES, bound_growth
from ferrule_server.text.tokenizer_config import TokenizerConfig

if TYPE_CHECKING:
    from ferrule_server.text.chat_template import ChatTemplate

_log = logging.getLogger(__name__)

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_MAX_CHARACTER_BYTES = 4
_REPLACEMENT = "\ufffd"
_SECRET_BYTES = 8

_Renderings = Iterable[Sequence[str]]


class Tokenizer:
    """The tokenizer of one model; it has no state that callers can change and is safe to share between threads.

    Invariant: no text is truncated or padded, whatever ``tokenizer.json`` says.

    Only the batch calls of ``tokenizers`` release the interpreter. A text of 4 MiB blocked all other threads for 6.7 s
    in ``encode`` and for 0.07 s in ``encode_batch_fast``, which also takes a third of the time (it keeps no offsets).

    Args:
        text: The content of a ``tokenizer.json``.
        eos_token: The token that ends a text, as the model folder names it.
        named: More begin, end, padding and stop tokens that the model folder names, by id or text.
        renderings: See :meth:`ChatTemplate.around_messages`.

    Attributes:
        control_signs: See :meth:`ControlTokenFinder.signs_in`, of control tokens (``control_tokens.py``).
        vocab_size: Number of tokens.
        eos_id: The id of ``eos_token``; None: there is none, or the tokenizer does not know it.
        begin_ids: The tokens that the post-processor puts before a text; most models have one or none, GLM has two.
        answer_end: The control token that the chat template writes right after an answer that ends a conversation,
            apart from spaces; empty: it writes none there.

    Raises:
        ModelError: The text is not a tokenizer.
    """

    def __init__(
        self, text: str, eos_token: str | None = None, named: Collection[int | str] = (), renderings: _Renderings = ()
    ) -> None:
        self._encoding_growth, self._decoding_growth = bound_growth(text)
        self._parsing = _from_text(text)
        decoder_types = _decoder_types(self._parsing)
        self._byte_of_character = _byte_alphabet() if "ByteLevel" in decoder_types else {}
        self._has_byte_fallback = "ByteFallback" in decoder_types
        self.vocab_size: int = self._parsing.get_vocab_size(with_added_tokens=True)
        self.eos_id: int | None = None if eos_token is None else self._parsing.token_to_id(eos_token)
        self.begin_ids: tuple[int, ...] = self._find_begin()
        self.answer_end: tuple[int, ...] = ()
        ends = () if self.eos_id is None else (self.eos_id,)
        with _refusing("its special tokens are not usable"):
            self._control = control_tokens(self._parsing, {*named, *self.begin_ids, *ends}, renderings)
            self._control_finder = ControlTokenFinder(self._control.values(), self._parsing.normalizer)
            self.control_signs = self._control_finder.signs_in
            secret = secrets.token_hex(_SECRET_BYTES)
            self._spellings = {token.content: f"\ue000{secret}.{i}\ue001" for i, token in self._control.items()}
            self._literal = _from_text(_respelled(self._parsing, self._spellings))

    @classmethod
    def load(cls, folder: Path, template: ChatTemplate | None = None) -> Tokenizer | None:
        """Return the tokenizer of a model folder; None if it has no ``tokenizer.json``.

        Args:
            folder: The folder.
            template: Its chat templates. The tokens that they write around messages are control tokens.

        Raises:
            ModelError: The file, or one of those beside it, exists but is not usable.
        """
        path = folder / "tokenizer.json"
        try:
            text = read_text(folder, path.name, MAX_TOKENIZER_BYTES)
        except FileMissing:
            return None
        except ModelError as error:
            raise ModelError(f"{path} cannot be loaded: {error}") from error
        config = TokenizerConfig.load(folder)
        try:
            renderings = [] if template is None else list(template.around_messages())
            loaded = cls(text, config.special_tokens.get("eos_token"), config.named_tokens, renderings)
        except ModelError as error:
            raise ModelError(f"{path} cannot be loaded: {error}") from error
        if template is not None:
            loaded.answer_end = loaded._after_answer(template.after_answer())
        others = [name_of(token.content) for token in loaded._control.values() if not token.special]
        counts = len(loaded._control), len(others), len(renderings)
        _log.info("event=control_tokens num=%d num_not_special=%d num_renderings=%d", *counts)
        _log.debug("event=control_tokens not_special=%s", ",".join(others))
        return loaded

    def encode(self, text: str, add_special_tokens: bool = False, parse_special_tokens: bool = True) -> list[int]:
        """Return all token ids of a text.

        Args:
            text: The text, possibly empty.
            add_special_tokens: Add the tokens that the model expects around a text, such as a begin token.
            parse_special_tokens: Turn text that looks like a control token into that token.

        Raises:
            InvalidRequest: The text holds half a surrogate pair, which no UTF-8 can carry, or may become too long.
            RuntimeError: The library of the tokenizer failed, as a regular expression that takes too many steps does.
        """
        tokenizer = self._parsing if parse_special_tokens else self._literal
        try:
            _check_size("text", len(text.encode()), self._encoding_growth)
        except UnicodeEncodeError as error:
            raise InvalidRequest("text", f"character {error.start} is half a surrogate pair") from error
        with _surviving():
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def encode_prompt(self, text: str, parse_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text that the model continues: those of ``transformers`` without an end token.

        As there, only ``tokenizer.json`` decides; ``add_bos_token`` of other files has no effect. One thing differs: a
        begin token with which a parsed text itself begins is not added again.

        Raises:
            InvalidRequest, RuntimeError: As for :meth:`encode`.
        """
        token_ids, begin = self.encode(text, parse_special_tokens=parse_special_tokens), list(self.begin_ids)
        if not parse_special_tokens:
            return begin + token_ids
        num_new = next(i for i in range(len(begin) + 1) if token_ids[: len(begin) - i] == begin[i:])
        return begin[:num_new] + token_ids

    def control_texts(self, text: str) -> list[str]:
        """Return the text of each control token that :meth:`encode` would make of a part of a text, first ones first.

        Raises:
            InvalidRequest, RuntimeError: As for :meth:`encode`.
        """
        _check_size("messages", len(text.encode(errors="replace")), self._encoding_growth)
        with _surviving():
            return list(self._control_finder.found(text))

    def find_control_token(self, text: str) -> str | None:
        """Return the first of :meth:`control_texts` by a bounded name; None: there is none."""
        return next(map(name_of, self.control_texts(text)), None)

    def encode_framed(self, frame: str, fill: Callable[[str], str]) -> list[int]:
        """Return the token ids of a text in which only the control tokens of its frame are parsed.

        Args:
            frame: The text, with other words in place of the text of others.
            fill: Puts the text of others into the frame. It must leave all other text as it is.

        Raises:
            InvalidRequest: A control token of the frame would be lost. Neighbours of tokens can cause that: tokens
                whose texts overlap, or that are tokens only between spaces.
        """
        parsed = self.encode(frame)
        written = {self._control[i].content: parsed.count(i) for i in {*parsed} & self._control.keys()}
        for content in sorted(written, key=len, reverse=True):  # with Prepend, only the first one is a token
            frame = frame.replace(content, self._spellings[content], written[content])
        if self.encode(frame, parse_special_tokens=False) != parsed:
            raise InvalidRequest("messages", "have text beside which a control token of the template would be lost")
        return self.encode(fill(frame), parse_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 appear as U+FFFD.

        The text is that of ``transformers``, with one exception: among consecutive byte-fallback tokens, a broken
        character does not spoil complete ones. (In ``transformers``, ``A`` spelled ``<0x41>`` becomes U+FFFD once a
        broken byte follows, so a text that grows would have to change what was already sent.)

        Raises:
            TokenOutOfVocab: The tokenizer does not know a token; its vocabulary may be smaller than the model's.
            InvalidRequest, RuntimeError: As for :meth:`encode`.
        """
        length = sum(1 + len(self._token(i, token_id)) for i, token_id in enumerate(token_ids))
        _check_size("token_ids", length, self._decoding_growth)
        shown_ids = list(self.shown(token_ids, skip_special_tokens))
        with _surviving():
            (text,) = self._parsing.decode_batch([shown_ids], skip_special_tokens=False)
        return self._mended(str(text), shown_ids)

    def shown(self, token_ids: Iterable[int], skip_special_tokens: bool) -> Iterator[int]:
        """Yield the tokens that have a text: those of the vocabulary, except control tokens if they are skipped."""
        hidden = self._control if skip_special_tokens else ()
        for token_id in token_ids:
            if token_id not in hidden and self._parsing.id_to_token(token_id) is not None:
                yield token_id

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of a few tokens of the vocabulary, with special ones; not meant for long lists.

        Raises:
            RuntimeError: As for :meth:`encode`.
        """
        with _surviving():
            text = str(self._parsing.decode(token_ids, skip_special_tokens=False))
        return self._mended(text, token_ids)

    def num_incomplete(self, token_ids: Sequence[int]) -> int:
        """Return how many U+FFFD at the end of the text stand for a character that a later token could complete.

        Raises:
            TokenOutOfVocab: One of the last tokens is not in the tokenizer's vocabulary.
        """
        tail = b""
        for i in range(len(token_ids) - 1, -1, -1):
            tail = self._token_bytes(i, token_ids[i]) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(tail)
        num_bytes = len(decoder.getstate()[0])
        return num_bytes if self._has_byte_fallback else min(1, num_bytes)

    def _find_begin(self) -> tuple[int, ...]:
        """Return the tokens before a text; refuse a tokenizer that cannot encode a letter."""
        with _refusing("it cannot encode a text"):
            around, plain = self.encode("a", add_special_tokens=True), self.encode("a")
        num = next((i for i in range(len(around)) if around[i : i + len(plain)] == plain), 0)
        return tuple(around[:num])

    def _after_answer(self, written: str) -> tuple[int, ...]:
        """Return :attr:`answer_end` for the text that the chat template writes after an answer."""
        first = self.encode(written.lstrip())[:1]
        ends = self._control.keys() & self._parsing.get_added_tokens_decoder().keys()
        return tuple(first) if ends.issuperset(first) else ()

    def _mended(self, text: str, token_ids: Iterable[int]) -> str:
        """Return the text of tokens with complete characters beside broken ones; ``text`` is that of the library.

        The library decodes again with the broken bytes replaced. This is rare, so it may block (0.2 us per token).
        """
        if not self._has_byte_fallback or _REPLACEMENT not in text:
            return text
        with _surviving():
            return str(self._parsing.decoder.decode(list(self._mended_tokens(token_ids))))

    def _mended_tokens(self, token_ids: Iterable[int]) -> Iterator[str]:
        """Yield the tokens; the token U+FFFD replaces each byte that is not part of a complete character."""
        tokens = (str(self._parsing.id_to_token(token_id)) for token_id in token_ids)
        for is_bytes, run in itertools.groupby(tokens, lambda token: bool(_BYTE_FALLBACK.fullmatch(token))):
            if not is_bytes:
                yield from run
                continue
            spelled = bytes(int(token[3:5], 16) for token in run)
            for character in spelled.decode(errors="surrogateescape"):
                is_broken = "\udc80" <= character <= "\udcff"
                yield from (_REPLACEMENT,) if is_broken else (f"<0x{byte:02X}>" for byte in character.encode())

    def _token(self, index: int, token_id: int) -> str:
        """Return the spelling of a token in the vocabulary; ``index`` is its place in the request."""
        token: str | None = self._parsing.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            raise TokenOutOfVocab(f"token_ids[{index}]", token_id, self.vocab_size)
        return token

    def _token_bytes(self, index: int, token_id: int) -> bytes:
        """Return the bytes of a token: byte-level alphabet, byte fallback (``<0xE2>``) or plain text."""
        token = self._token(index, token_id)
        if self._byte_of_character and all(character in self._byte_of_character for character in token):
            return bytes(self._byte_of_character[character] for character in token)
        byte = _BYTE_FALLBACK.fullmatch(token) if self._has_byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else token.encode()


@contextlib.contextmanager
def _refusing(complaint: str) -> Iterator[None]:
    """Turn every error of the library in the body into a ModelError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{complaint}: {shown(str(error))}") from error


@contextlib.contextmanager
def _surviving() -> Iterator[None]:
    """Turn a panic of the library in the body into a RuntimeError, so that it ends one call and no thread.

    A panic of its Rust code derives from BaseException, and its class cannot be imported. Its message may quote the
    text, so it is left out.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError("the library of the tokenizer panicked; it has written why to standard error") from None


def _check_size(field: str, num_bytes: int, growth: int) -> None:
    """Refuse a text that the tokenizer may make too long."""
    if num_bytes * growth > MAX_BYTES:
        most = MAX_BYTES // growth
        raise InvalidRequest(
            field, f"is a text of {num_bytes} bytes; this tokenizer takes {most} at a time, send it in pieces"
        )


def _from_text(text: str) -> tokenizers.Tokenizer:
    """Return a tokenizer that neither truncates nor pads."""
    with _refusing("not a tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _respelled(tokenizer: tokenizers.Tokenizer, spellings: Mapping[str, str]) -> str:
    """Return the ``tokenizer.json`` in which some added tokens have another text, with their ids as before.

    They are also renamed in the vocabulary: a Unigram model would make ``</s>`` of these four letters. Merges that make
    or take such a token are left out. The new texts are tokens wherever they stand.
    """
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        if token["content"] in spellings:
            token |= {"content": spellings[token["content"]], "single_word": False}
    model, vocab = described["model"], described["model"]["vocab"]
    pairs = (
        (spellings.get(word, word), value) for word, value in (vocab.items() if isinstance(vocab, dict) else vocab)
    )
    model["vocab"] = type(vocab)(pairs)
    model["unk_token"] = spellings.get(model.get("unk_token"), model.get("unk_token"))
    model["merges"] = [pair for pair in model.get("merges", ()) if spellings.keys().isdisjoint((*pair, "".join(pair)))]
    return json.dumps(described)


def _decoder_types(tokenizer: tokenizers.Tokenizer) -> set[str]:
    """Return the names of the decoders of a tokenizer, also those inside a sequence of decoders."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    return {part.get("type", "") for part in (decoder, *decoder.get("decoders", ()))}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet (Radford et al., GPT-2, ``bytes_to_unicode``).

    Printable Latin-1 bytes are their own characters; the other 68 bytes are the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}
