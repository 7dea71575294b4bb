"""The two clients have one surface: the same classes, methods, arguments and words, but for awaiting."""

from __future__ import annotations

import inspect
from types import FunctionType

import pytest

import ferrule
import ferrule.admin
import ferrule.errors
import ferrule.types
from ferrule_client import errors, items, masks, policy, types, views
from tools import strip_async

PUBLIC = (ferrule, ferrule.types, ferrule.errors, ferrule.admin)
SHARED = (errors, items, masks, policy, types, views)
NAMES = [
    *("Admin", "Branch", "Branches", "Cache", "Chat", "Client", "Detokenizer", "ForwardPass", "Generation", "Stream"),
]
WITHOUT_WAITING = {
    "Branch": {"attach"},
    "Cache": {"detach", "fork", "generate"},
    "Chat": {"fork", "undo"},
    "Client": {"adopt", "chat", "detokenizer", "forward", "generate", "list_caches", "prefill", "stream"},
    "Generation": {"pieces"},
}
SENDS_NOTHING = {"__init__", "__iter__", "__len__", "__getitem__", "__repr__", "__del__", "__reduce__"}

Pair = tuple[type, type]


def public_classes() -> dict[str, type]:
    """Return each public class by its name, and make sure that it has one place to be imported from."""
    found: dict[str, type] = {}
    for module in PUBLIC:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                assert found.setdefault(name, value) is value, name
    return found


def twins() -> list[Pair]:
    """Return each public class with its asyncio twin."""
    classes = public_classes()
    return [(classes[name], classes[f"Async{name}"]) for name in NAMES]


each_pair = pytest.mark.parametrize("pair", twins(), ids=lambda pair: pair[0].__name__)


def members(cls: type) -> dict[str, object]:
    """Return what a class defines itself: public names, and dunders that it writes."""
    return {
        name: value
        for name, value in vars(cls).items()
        if (not name.startswith("_") or isinstance(value, FunctionType))
        and (not name.startswith("_") or name.startswith("__"))
    }


def test_every_public_class_has_a_twin() -> None:
    """What connects, holds a sequence or iterates is there twice; everything else is one class for both."""
    classes = public_classes()
    assert {name for name in classes if name.startswith("Async")} == {f"Async{name}" for name in NAMES}
    values = {name for name, cls in classes.items() if any(getattr(one, name, None) is cls for one in SHARED)}
    assert set(classes) - values == {*NAMES, *(f"Async{name}" for name in NAMES)}


@each_pair
def test_what_waits_is_a_coroutine_and_nothing_else_is(pair: Pair) -> None:
    """Calls over the network are awaited; loops and blocks are entered without."""
    sync, twin = pair
    for name, member in members(twin).items():
        if isinstance(member, FunctionType):
            waits = inspect.iscoroutinefunction(member)
            assert waits == (name not in WITHOUT_WAITING.get(sync.__name__, set()) | SENDS_NOTHING), name
    assert not [name for name, member in members(sync).items() if inspect.iscoroutinefunction(member)]


def test_the_sync_client_is_the_one_written_from_the_asyncio_one() -> None:
    """A change of the asyncio client comes with a run of the tool."""
    written = strip_async.generate()
    paths = {path.name: path for path in strip_async.TARGET.glob("*.py") if path.stem not in strip_async.BY_HAND}
    assert sorted(written) == sorted(paths)
    differing = [name for name, path in paths.items() if path.read_text("utf-8") != written[name]]
    assert differing == [], "run `python -m tools.strip_async`"


@pytest.mark.parametrize("name", sorted(path.name for path in strip_async.SOURCE.glob("*.py")))
def test_every_module_has_its_counterpart(name: str) -> None:
    """But for what only awaiting needs; what is written says so, and what is not does not."""
    path = strip_async.TARGET / name
    assert path.exists() == (name != "_opening.py")
    if path.exists():
        is_written = path.read_text("utf-8").startswith("# Written by tools/strip_async.py")
        assert is_written == (path.stem not in strip_async.BY_HAND)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("output = (await cache.append(1)).token", "output = cache.append(1).token"),
        ('text = (await client.generate("f(", 2).read()).text', 'text = client.generate("f(", 2).read().text'),
        ("print(await chat.send(text))", "print(chat.send(text))"),
        ("async with client.prefill(ids) as cache: ...", "with client.prefill(ids) as cache: ..."),
        ("async for token in cache.generate(): ...", "for token in cache.generate(): ..."),
        ("[token async for token in cache.generate(3)]", "[token for token in cache.generate(3)]"),
        ("def follow(self, tip: Tip) -> AsyncCache: ...", "def follow(self, tip: Tip) -> Cache: ..."),
        ("Callable[[int], Awaitable[list[int]]]", "Callable[[int], list[int]]"),
        ("Not safe to use from two tasks at once.", "Not safe to use from two threads at once."),
        ("cache.handle", "cache.handle"),
        ("a text, not code", "a text, not code"),
    ],
)
def test_awaiting_is_taken_out(source: str, expected: str) -> None:
    """Of code, of examples in docstrings and of what these say."""
    assert strip_async.stripped(source) == expected


def test_a_bracket_without_its_end_is_told() -> None:
    """Rather than left in the module."""
    with pytest.raises(ValueError, match="no bracket closes"):
        strip_async.stripped("x = (await f(y)")
