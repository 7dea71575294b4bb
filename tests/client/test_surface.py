"""How much a user has to learn: the number of public names, methods and arguments. A gate is raised on purpose only."""

from __future__ import annotations

import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator

import pytest

import ferrule
from ferrule import AsyncClient, Cache, Client, Stream
from ferrule.errors import DeadlineExceededError, FerruleError, PendingTokenError, UnavailableError
from ferrule.types import AsyncCache, AsyncStream

MAX_NAMES = 16
"""Three of them are kept free for what follows."""
MAX_METHODS = 45
"""Of ``Client``, ``Cache`` and ``Stream`` together; eight are kept free."""
MAX_ARGUMENTS = 151
"""Besides 130: ``durability`` of the client and ``drop_outside_window`` of ``prefill`` and ``generate``, which are said
where a sequence is made; ``parse_special_tokens`` and ``add_special_tokens`` of the calls that take a text;
``continue_final_message`` of ``apply_chat_template``, which ``add_generation_prompt`` cannot say; and ``continuations``
of ``score``, which shares one context among them."""


def methods(kind: type) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield the public methods of a class by name, each name once, and its constructor."""
    for name, value in vars(kind).items():
        if name == "__init__" and kind not in (Client, AsyncClient):  # users call no other constructor
            continue
        if callable(value) and (name == "__init__" or not name.startswith("_")):
            yield name, value


def arguments(method: Callable[..., object]) -> int:
    """Return the number of arguments of a method besides ``self``."""
    return len(inspect.signature(method).parameters) - 1


def test_the_top_level_has_few_names() -> None:
    """Everything else is in ``ferrule.types``, ``ferrule.errors`` and ``ferrule.admin``."""
    assert len(ferrule.__all__) <= MAX_NAMES - 3
    assert sorted(ferrule.__all__) == list(ferrule.__all__)
    for name in ferrule.__all__:
        assert getattr(ferrule, name).__doc__
    assert set(ferrule.__all__) <= set(dir(ferrule))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(ferrule, "nothing")  # noqa: B009


@pytest.mark.parametrize("kinds", [(Client, Cache, Stream), (AsyncClient, AsyncCache, AsyncStream)])
def test_the_main_classes_have_few_methods_and_arguments(kinds: tuple[type, ...]) -> None:
    """A constructor and ``decode``, another name of ``append``, do not count as methods; their arguments do."""
    found = [(name, method) for kind in kinds for name, method in methods(kind) if name != "decode"]
    assert len([name for name, _ in found if name != "__init__"]) <= MAX_METHODS - 8
    assert sum(arguments(method) for _, method in found) <= MAX_ARGUMENTS


@pytest.mark.parametrize("module", ["ferrule.types", "ferrule.errors", "ferrule.admin"])
def test_public_modules_have_what_they_name(module: str) -> None:
    """Sorted, documented, and no name twice."""
    public = importlib.import_module(module)
    assert public.__doc__
    assert list(public.__all__) == sorted(set(public.__all__))
    for name in public.__all__:
        value = getattr(public, name)
        assert not inspect.isclass(value) or value.__doc__, name


def test_classes_say_where_users_find_them() -> None:
    """In tracebacks and pickles it is the public module."""
    names = dict.fromkeys(ferrule.__all__, "ferrule")
    for module in ("ferrule.errors", "ferrule.admin", "ferrule.types"):
        names |= {name: module for name in importlib.import_module(module).__all__ if name not in names}
    for name, module in names.items():
        value = getattr(importlib.import_module(module), name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ == module, name
    error = pickle.loads(pickle.dumps(PendingTokenError(7)))
    assert isinstance(error, PendingTokenError)
    assert error.token == 7


def test_errors_are_those_of_the_language_too() -> None:
    """What catches broken connections and timeouts of other libraries catches ours."""
    assert issubclass(UnavailableError, (FerruleError, ConnectionError))
    assert issubclass(UnavailableError, ConnectionError)
    assert issubclass(DeadlineExceededError, TimeoutError)
    assert issubclass(PendingTokenError, ValueError)
