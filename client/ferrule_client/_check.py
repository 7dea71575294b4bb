"""Arguments checked by name where they enter, before anything is sent."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsFloat, cast

import numpy as np

_MAX_UINT32 = 2**32 - 1
_INSTANCE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")


def token_list(tokens: object) -> list[int]:
    """Return one or several token ids as a list; raise TypeError for a text, bytes or floats.

    Raise ValueError for an id that is negative or above 32 bits; the server checks it against the vocabulary.
    """
    try:
        ids = _ints(tokens)
    except TypeError:
        text = "token ids must be integers; use client.tokenize(text) to make them of a text"
        if isinstance(tokens, Sequence) and any(isinstance(one, Mapping) for one in tokens):
            text = "token ids must be integers; use client.apply_chat_template(messages) to make them of a conversation"
        raise TypeError(f"{text} (got {_kind(tokens)})") from None
    if ids and (min(ids) < 0 or max(ids) > _MAX_UINT32):
        wrong = next(i for i in ids if not 0 <= i <= _MAX_UINT32)
        raise ValueError(f"token ids must not be negative nor above {_MAX_UINT32}, got {wrong}")
    return ids


def _ints(tokens: object) -> list[int]:
    if isinstance(tokens, np.ndarray):
        if tokens.size and (tokens.dtype.kind not in "iu" or tokens.ndim > 1):
            raise TypeError
        return cast("list[int]", tokens.reshape(-1).tolist())
    if isinstance(tokens, (str, bytes, bytearray, memoryview)):
        raise TypeError
    if isinstance(tokens, Sequence):
        return [operator.index(i) for i in tokens]
    return [operator.index(cast("int", tokens))]


def _kind(tokens: object) -> str:
    if isinstance(tokens, np.ndarray):
        return f"an array of {tokens.dtype} in {tokens.ndim} dimensions"
    several = tokens if isinstance(tokens, (list, tuple)) else ()
    wrong = next((i for i in several if not hasattr(i, "__index__")), None)
    return type(tokens).__name__ if wrong is None else f"{type(tokens).__name__} with {wrong!r}"


def whole(name: str, value: object, low: int = 0, high: int | None = None) -> None:
    """Raise ValueError if an argument is not a whole number in its range; None, for "not given", passes."""
    if value is None:
        return
    try:
        is_good = low <= operator.index(cast("int", value)) <= (math.inf if high is None else high)
    except TypeError:
        is_good = False
    if not is_good:
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be a whole number {bounds}, got {value!r}")


def instance(name: object) -> None:
    """Raise TypeError or ValueError if this cannot be the name of an instance; None, for "any", passes."""
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"instance must be a text or None, got {name!r}")
    if not _INSTANCE.fullmatch(name):
        raise ValueError(f"an instance is named by 1 to 64 of A-Z a-z 0-9 _ -, got {name!r}")


def number(
    name: str, value: object, low: float = -math.inf, high: float = math.inf, *, above_low: bool = False
) -> None:
    """Raise ValueError if an argument is not a finite number in its range; None, for "not given", passes."""
    if value is None:
        return
    try:
        x = math.nan if isinstance(value, str) else float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError):
        x = math.nan
    if not (math.isfinite(x) and low <= x <= high and not (above_low and x == low)):
        raise ValueError(f"{name} must be a number{_bounds(low, high, above_low)}, got {value!r}")


def _bounds(low: float, high: float, above_low: bool) -> str:
    parts = [] if low == -math.inf else [f"more than {low:g}" if above_low else f"at least {low:g}"]
    return " of " + " and ".join([*parts, *([] if high == math.inf else [f"at most {high:g}"])]) if parts else ""


def seconds(name: str, value: object) -> None:
    """Raise ValueError if a time limit is not more than 0; None, for no limit, passes."""
    if value != math.inf:
        number(name, value, 0, above_low=True)


def choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return which of the choices a word is, in any case; raise ValueError if it is none of them."""
    known = list(choices)
    word = value.lower() if isinstance(value, str) else ""
    if word not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return word


def token(value: object) -> None:
    """Raise TypeError or ValueError if no header can carry a bearer token; None passes. No error repeats any of it."""
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"the token must be a text, got {type(value).__name__}")
    place = next((i for i, one in enumerate(value) if not " " < one <= "~"), None)
    if place is not None:
        raise ValueError(f"the token has a character at {place} of {len(value)} that no header can carry; strip it")


def target(value: object) -> str:
    """Return an address as given; raise an error if it is not ``host:port``, ``unix:PATH`` or another of gRPC's."""
    if not isinstance(value, str):
        raise TypeError(f"the target must be a text such as '127.0.0.1:50051' or 'unix:/run/x.sock', got {value!r}")
    scheme = next((one for one in _SCHEMES if value.startswith(one)), None)
    if scheme is not None and len(value) > len(scheme):
        return value
    host, _, port = value.rpartition(":")
    is_host = bool(host) and not set(host) & set("/ \t\n") and (":" not in host or host.startswith("["))
    if scheme is not None or not is_host or not (port.isascii() and port.isdecimal()):
        raise ValueError(f"the target must be host:port, [IPv6]:port or unix:PATH, got {value!r}")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"the port of the target must be from 1 to 65535, got {value!r}")
    return value


def text(value: object) -> None:
    """Raise TypeError if this is not a text, ValueError if it cannot be written in UTF-8."""
    if not isinstance(value, str):
        hint = "; decode it first" if isinstance(value, (bytes, bytearray)) else ""
        raise TypeError(f"the text must be a str, got {type(value).__name__}{hint}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(value[error.start]):04X}"
        raise ValueError(f"the text is not valid Unicode: half a surrogate pair, {code}, at {error.start}") from None
