"""A setting of ``sample`` beside the arguments of a call is refused with what to write instead."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from ferrule import AsyncClient, Cache, Client, Stream, sample
from ferrule.types import Append, AsyncCache, AsyncStream, Prompt, Sampling, Settings, Verify

CLASSES = (Client, Cache, Stream, AsyncClient, AsyncCache, AsyncStream, Prompt, Append, Verify)
METHODS = [
    pytest.param(value, id=f"{cls.__name__}.{name}")
    for cls in CLASSES
    for name, value in vars(cls).items()
    if inspect.isfunction(value) and "policy" in inspect.signature(value).parameters
]


def refused(method: Callable[..., Any], **settings: Any) -> str:  # Any: whatever a caller gets wrong
    """Return what a method says when it is called with settings, on no object at all."""

    async def awaited() -> object:
        result = method(None, **settings)
        return await result if inspect.isawaitable(result) else result

    with pytest.raises(TypeError) as error:
        asyncio.run(awaited())
    return str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_every_call_with_a_policy_says_where_a_setting_belongs(method: Callable[..., Any]) -> None:
    """Each setting by its name, of whatever call."""
    for name in [*(field.name for field in dataclasses.fields(Sampling)), *Settings.__annotations__]:
        assert refused(method, **{name: 0.3}).endswith(f"takes no {name}: pass policy=sample({name}=0.3)")


def test_several_settings_are_named_together() -> None:
    """Values that are short are shown; the text can be pasted."""
    text = refused(Client.generate, prompt="a", temperature=0.3, mask=[7], seed=1)
    instead = "policy=sample(temperature=0.3, mask=..., seed=1)"
    assert text == f"generate() takes no temperature nor mask nor seed: pass {instead}"
    assert refused(Append.__init__, cache=None, seed=1) == "Append() takes no seed: pass policy=sample(seed=1)"
    assert "mask" not in Verify.__init__.__annotations__  # `masks` of a verify is its own argument


@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_what_scores_says_that_it_draws_nothing(cls: type) -> None:
    """And a loop says what the length is called; a call without one is left to the language."""
    text = refused(cls.score, tokens="a", max_new_tokens=3, temperature=0.3)  # type: ignore[attr-defined]
    assert text == "score() takes no max_new_tokens nor temperature: it draws nothing; generate() does"
    text = refused(cls.generate, prompt="a", max_new_tokens=3)  # type: ignore[attr-defined]
    assert text == "generate() takes no max_new_tokens: pass max_tokens=3"
    text = refused(cls.prefill, tokens="a", max_new_tokens=3)  # type: ignore[attr-defined]
    assert "unexpected keyword argument 'max_new_tokens'" in text


def test_everything_else_is_refused_by_the_language() -> None:
    """And what is right goes through."""
    assert "unexpected keyword argument 'temprature'" in refused(Client.generate, prompt="a", temprature=0.3)
    assert Prompt("a", policy=sample(temperature=0.3)).policy == sample(temperature=0.3)


def test_a_coroutine_function_stays_one() -> None:
    """As do its signature and its words."""
    assert inspect.iscoroutinefunction(AsyncCache.append)
    assert not inspect.iscoroutinefunction(Cache.append)
    assert "policy" in inspect.signature(Cache.append).parameters
    assert Cache.append.__doc__ is not None
