"""The two clients have one surface: the same classes, methods, arguments and words, but for what awaiting asks."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import ferrule_client
import ferrule_client.aio
from ferrule_client import items, masks, types, views

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    *("Admin", "Branch", "Cache", "Client", "Detokenizer", "ForwardPass", "Generation", "Stream", "TextGeneration"),
]
DUNDERS = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__next__": "__anext__", "__iter__": "__aiter__"}
WITHOUT_WAITING = {
    "Branch": {"attach"},
    "Cache": {"detach", "generate", "generate_text", "give_up", "has_room", "lease_anew", "sibling"},
    "Client": {"adopt", "connect", "detokenizer", "forward", "generate", "list_caches", "prefill", "stream"},
}
SENDS_NOTHING = {"__init__", "__iter__", "__aiter__", "__repr__", "__del__", "__reduce__"}

Pair = tuple[type, type]


def twins() -> list[Pair]:
    """Return each public class with its asyncio twin."""
    sync = {name: getattr(ferrule_client, name, None) for name in NAMES}
    return [(cls, getattr(ferrule_client.aio, f"Async{name}")) for name, cls in sync.items() if cls is not None]


def members(cls: type) -> dict[str, object]:
    """Return what a class defines itself: public names, and dunders that it writes."""
    return {
        name: value.__func__ if isinstance(value, classmethod) else value
        for name, value in vars(cls).items()
        if (not name.startswith("_") or isinstance(value, FunctionType))
        and (not name.startswith("_") or name.startswith("__"))
    }


def as_sync(text: str) -> str:
    """Return an annotation of the asyncio client as the sync one has it."""
    text = re.sub(r"\bAsync(Iterator)\b", r"\1", text)
    return re.sub(rf"\bAsync({'|'.join(NAMES)})\b", r"\1", text)


def signature(function: object) -> list[tuple[object, ...]]:
    """Return the parameters of a function, and what it returns, in words that both clients share."""
    assert callable(function)
    found = inspect.signature(function)
    parameters = [(one.name, one.kind, one.default, as_sync(str(one.annotation))) for one in found.parameters.values()]
    return [*parameters, ("return", as_sync(str(found.return_annotation)))]


def test_every_public_class_has_a_twin() -> None:
    """What connects, holds a sequence or iterates is there twice; everything else is shared."""
    assert ferrule_client.aio.__all__ == [f"Async{name}" for name in NAMES]
    assert len(twins()) == len(NAMES)
    values = {*types.__all__, *items.__all__, *masks.__all__, *views.__all__, "Policy", "Greedy", "Sampling"}
    classes = {
        name
        for name in ferrule_client.__all__
        if inspect.isclass(cls := getattr(ferrule_client, name)) and not issubclass(cls, Exception)
    }
    assert classes - values == set(NAMES)


@pytest.mark.parametrize("pair", twins(), ids=lambda pair: pair[0].__name__)
def test_twins_have_the_same_members(pair: Pair) -> None:
    """Every method and property by name, and none besides."""
    sync, twin = pair
    assert sorted(DUNDERS.get(name, name) for name in members(sync)) == sorted(members(twin))


@pytest.mark.parametrize("pair", twins(), ids=lambda pair: pair[0].__name__)
def test_twins_take_and_return_the_same(pair: Pair) -> None:
    """Names, kinds, defaults and annotations of parameters; what comes back, but for the awaiting."""
    sync, twin = pair
    for name, member in members(sync).items():
        other = members(twin)[DUNDERS.get(name, name)]
        assert isinstance(other, property) == isinstance(member, property), name
        if isinstance(member, property) and isinstance(other, property):
            assert signature(other.fget) == signature(member.fget), name
        elif isinstance(member, FunctionType):
            assert signature(other) == signature(member), name


@pytest.mark.parametrize("pair", twins(), ids=lambda pair: pair[0].__name__)
def test_what_waits_is_a_coroutine_and_nothing_else_is(pair: Pair) -> None:
    """Calls over the network are awaited; loops and blocks are entered without."""
    sync, twin = pair
    for name, member in members(twin).items():
        if isinstance(member, FunctionType):
            waits = inspect.iscoroutinefunction(member)
            assert waits == (name not in WITHOUT_WAITING.get(sync.__name__, set()) | SENDS_NOTHING), name


@pytest.mark.parametrize("pair", twins(), ids=lambda pair: pair[0].__name__)
def test_twins_explain_the_same(pair: Pair) -> None:
    """Every member of the one that has a docstring has one in the other, which names only asyncio's classes."""
    sync, twin = pair
    for name, member in {"": sync, **members(sync)}.items():
        other = members(twin)[DUNDERS.get(name, name)] if name else twin
        text, other_text = inspect.getdoc(member), inspect.getdoc(other)
        assert bool(text) == bool(other_text), name
        if text and other_text and name and not name.startswith("_"):
            assert text.count("\n\n") == other_text.count("\n\n"), name
            assert not re.search(rf"\b(?<!Async)({'|'.join(NAMES)})\b|\bthreads?\b", other_text), name
            for attribute in re.findall(r"^    (\w+): ", text, re.MULTILINE):
                assert f"    {attribute}: " in other_text, (name, attribute)


def test_the_asyncio_client_is_the_one_written_from_the_sync_one() -> None:
    """A change of the sync client comes with a run of the tool; the message says which."""
    command = [sys.executable, str(ROOT / "client" / "generate_aio.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("output = cache.decode(1).token", "output = (await cache.decode(1)).token"),
        ("with client.prefill(ids) as cache: ...", "async with client.prefill(ids) as cache: ..."),
        ("for token in cache.generate(): ...", "async for token in cache.generate(): ..."),
        ("tokens = list(cache.generate(3))", "tokens = [token async for token in cache.generate(3)]"),
        ("cache.handle", "cache.handle"),
        ("a text, not code", "a text, not code"),
    ],
)
def test_examples_in_docstrings_are_translated(sync: str, expected: str) -> None:
    """As the code itself is."""
    sys.path.insert(0, str(ROOT / "client"))
    try:
        import generate_aio
    finally:
        sys.path.pop(0)
    assert generate_aio.translate_example(sync, frozenset({"decode", "prefill"})) == expected
