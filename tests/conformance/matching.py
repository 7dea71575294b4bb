"""Whether a reply, as proto3 JSON, is what a case expects: what is said must hold, what is not said may be anything.

A mapping with one key that starts with ``$`` is a matcher; all others are compared field by field. An expected default
(false, 0, an empty text or list) matches a field that is left out, as proto3 JSON leaves them out.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.rpc import code_pb2

Json = Any
"""Whatever JSON and YAML can hold."""

_MISSING = object()


def differences(expected: Json, actual: Json, path: str = "") -> Iterator[str]:
    """Yield a sentence for each thing that is not as expected."""
    matcher = _matcher_of(expected)
    if matcher is not None:
        yield from matcher(actual, path)
    elif actual is _MISSING:
        if expected:
            yield f"{path} is missing, expected {expected!r}"
    elif isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            yield f"{path} is {_short(actual)}, expected fields"
            return
        for key, value in expected.items():
            yield from differences(value, actual.get(str(key), _MISSING), f"{path}.{key}")
    elif isinstance(expected, list):
        yield from _list_differences(expected, actual, path)
    elif not _equal(expected, actual):
        yield f"{path} is {_short(actual)}, expected {expected!r}"


def _list_differences(expected: list[Json], actual: Json, path: str) -> Iterator[str]:
    if not isinstance(actual, list) or len(actual) != len(expected):
        yield f"{path} is {_short(actual)}, expected a list of {len(expected)}"
        return
    for place, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        yield from differences(wanted, got, f"{path}[{place}]")


def _equal(expected: Json, actual: Json) -> bool:
    """Compare as proto3 JSON means it: 64-bit numbers may be text, floats are those of 32 bits."""
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int) and isinstance(actual, str):
        return str(expected) == actual
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        return struct.pack("<f", expected) == struct.pack("<f", actual)
    return bool(expected == actual)


def _short(value: Json) -> str:
    text = repr(value)
    return "missing" if value is _MISSING else text if len(text) <= 200 else f"{text[:200]}..."


def _matcher_of(expected: Json) -> Callable[[Json, str], Iterator[str]] | None:
    """Return what judges a value, where the expectation is a matcher.

    Raises:
        ValueError: It looks like one and there is none of this name.
    """
    if not isinstance(expected, Mapping) or len(expected) != 1:
        return None
    ((name, argument),) = expected.items()
    if not str(name).startswith("$"):
        return None
    if name not in MATCHERS:
        raise ValueError(f"no matcher {name}; there are {', '.join(MATCHERS)}")
    matcher = MATCHERS[name]
    return lambda actual, path: matcher(argument, actual, path)


def _holds(is_true: bool, sentence: str) -> Iterator[str]:
    if not is_true:
        yield sentence


def _present(wanted: bool, actual: Json, path: str) -> Iterator[str]:
    return _holds(
        (actual is not _MISSING) == wanted, f"{path} is {_short(actual)}, expected it {'' if wanted else 'un'}set"
    )


def _length(wanted: int, actual: Json, path: str) -> Iterator[str]:
    size = 0 if actual is _MISSING else len(actual)
    return _holds(size == wanted, f"{path} has {size} entries, expected {wanted}")


def _size(wanted: int, actual: Json, path: str) -> Iterator[str]:
    size = 0 if actual is _MISSING else len(base64.b64decode(actual))
    return _holds(size == wanted, f"{path} has {size} bytes, expected {wanted}")


def _between(wanted: list[float], actual: Json, path: str) -> Iterator[str]:
    number = 0.0 if actual is _MISSING else float(str(actual).removesuffix("s"))
    return _holds(wanted[0] <= number <= wanted[1], f"{path} is {number}, expected {wanted[0]} to {wanted[1]}")


def _matches(wanted: str, actual: Json, path: str) -> Iterator[str]:
    is_text = isinstance(actual, str)
    return _holds(
        is_text and re.fullmatch(wanted, actual) is not None, f"{path} is {_short(actual)}, expected {wanted}"
    )


def _not(wanted: Json, actual: Json, path: str) -> Iterator[str]:
    return _holds(
        next(differences(wanted, actual, path), None) is not None, f"{path} is {_short(actual)}, as it must not be"
    )


def _has(wanted: list[Json], actual: Json, path: str) -> Iterator[str]:
    values = [] if actual is _MISSING else list(actual)
    for one in wanted:
        found = any(next(differences(one, value), None) is None for value in values)
        yield from _holds(found, f"{path} has no {one!r}")


def _without(wanted: list[str], actual: Json, path: str) -> Iterator[str]:
    """No name and no value anywhere in it has any of these texts."""
    text = "" if actual is _MISSING else json.dumps(actual, ensure_ascii=False)
    for one in wanted:
        yield from _holds(one not in text, f"{path} has {one!r} in it")


def _float32(wanted: Mapping[str, Json], actual: Json, path: str) -> Iterator[str]:
    """Compare the bytes of a tensor: `size` elements, 0 but for `values` and, within the last bit, `near`."""
    data = b"" if actual is _MISSING else base64.b64decode(actual)
    if len(data) != 4 * wanted["size"]:
        yield f"{path} has {len(data)} bytes, expected {wanted['size']} elements"
        return
    expected: list[float] = [0.0] * wanted["size"]
    for key in ("values", "near"):
        for place, value in wanted.get(key, {}).items():
            expected[int(place)] = value
    slack = {int(place) for place in wanted.get("near", {})}
    for place, value in enumerate(expected):
        got = data[4 * place : 4 * place + 4]
        off = abs(int.from_bytes(got, "little") - int.from_bytes(struct.pack("<f", value), "little"))
        yield from _holds(off <= (place in slack), f"{path}[{place}] is {got.hex()}, expected {value!r}")


def _status(wanted: Mapping[str, Json], actual: Json, path: str) -> Iterator[str]:
    """Compare a google.rpc.Status: `code` by name, `reason`, `metadata`, and kinds of further `details`."""
    status = {} if actual is _MISSING else actual
    code = code_pb2.Code.Name(status.get("code", 0))
    yield from _holds(code == wanted["code"], f"{path} ended with {code}, expected {wanted['code']}: {_short(status)}")
    details = {str(one.get("@type", "")).rpartition(".")[2]: one for one in status.get("details", [])}
    infos = [one for one in status.get("details", []) if str(one.get("@type")).endswith("google.rpc.ErrorInfo")]
    if "reason" not in wanted:
        yield from _holds(not infos, f"{path} carries {infos}, expected an error of gRPC itself")
        return
    yield from _holds(len(infos) == 1, f"{path} carries {len(infos)} ErrorInfo, expected one: {_short(status)}")
    for info in infos:
        yield from _holds(
            info["reason"] == wanted["reason"], f"{path} says {info['reason']}, expected {wanted['reason']}"
        )
        yield from _holds(info.get("domain") == "ferrule", f"{path} is of the domain {info.get('domain')}")
        yield from differences(wanted.get("metadata", {}), info.get("metadata", {}), f"{path}.metadata")
    for kind in wanted.get("details", []):
        yield from _holds(kind in details, f"{path} carries no {kind}")


MATCHERS: Mapping[str, Callable[[Any, Json, str], Iterator[str]]] = {
    "$present": _present,
    "$length": _length,
    "$bytes": _size,
    "$between": _between,
    "$matches": _matches,
    "$not": _not,
    "$has": _has,
    "$without": _without,
    "$float32": _float32,
    "$status": _status,
}
"""What a case can say about a value besides the value itself."""
