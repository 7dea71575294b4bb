"""OpenAI's form of requests, replies and errors, for the gateway beside this file."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import itertools
import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Set
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ferrule import FerruleError, HandleNotFoundError, errors, sample
from ferrule.types import ChatPrompt

_LOG = logging.getLogger("uvicorn.error")
Json = dict[str, Any]
FINISH = {"max_tokens": "length", "context_full": "length"}  # the others are "stop"
TYPES: dict[str, tuple[type, ...]] = {"a text": (str,), "a list": (list,), "a text or a list of texts": (str, list)}
TYPES |= {"a whole number": (int,), "a number": (int, float), "true or false": (bool,), "an object": (dict,)}
KINDS = {"model": "a text", "messages": "a list", "stop": "a text or a list of texts", "seed": "a whole number"}
KINDS |= dict.fromkeys(("max_tokens", "max_completion_tokens", "n", "top_logprobs"), "a whole number")
KINDS |= dict.fromkeys(("temperature", "top_p", "frequency_penalty", "presence_penalty"), "a number")
KINDS |= {
    "logprobs": "true or false",
    "stream": "true or false",
    "stream_options": "an object",
    "logit_bias": "an object",
}
SAMPLING = {"temperature", "top_p", "frequency_penalty", "presence_penalty", "logprobs", "top_logprobs"}
IGNORED = {"user", "safety_identifier", "prompt_cache_key"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none", "minimal", "low", "medium", "high"),
}  # values that ask for nothing, or for what has no effect here; any other is not supported
SERVED = {*KINDS, *IGNORED, *NEUTRAL}
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
BOUND = 2**31  # of every number but the seed
MAX_CHOICES = 128  # as at OpenAI; the client makes an object for each before the server is asked
MAX_BODY_BYTES = 4 << 20
STALL_S = 60.0
PORTS = {"http": 80, "https": 443}
MAX_ENTRIES = 4096  # of a list or an object, as at the server: to look at more of them would hold up others
LOST = (HandleNotFoundError, errors.HandleStaleError, errors.InstanceUnreachableError, errors.WrongInstanceError)
STATUSES: dict[type[FerruleError], int] = {errors.ResourceExhaustedError: 429, errors.DeadlineExceededError: 504}
STATUSES |= dict.fromkeys((errors.InvalidRequestError, errors.OutOfRangeError, errors.UnsupportedError), 400)
STATUSES |= dict.fromkeys((errors.UnavailableError, *LOST), 503)


def paths(request: Request) -> list[str]:
    """Return what the application of a request serves, such as ``GET /healthz``."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return [f"{min(route.methods or ['GET'])} {route.path_format}" for route in routes]


async def refuse(request: Request | None, error: Exception) -> JSONResponse:
    """Return what an exception means to the client, in OpenAI's form."""
    if isinstance(error, FerruleError):
        status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
        text, code, param = error.message, error.reason.lower(), error.metadata.get("field")
    elif not isinstance(error, HTTPException):
        status, text, code, param = 500, "the gateway failed; its log says why", "internal_error", None
    else:
        status, text = error.status_code, error.detail
        code = {401: "invalid_api_key"}.get(status, "invalid_request")
        code = "model_not_found" if isinstance(error, UnknownModel) else code
        param = getattr(error, "param", None)
        if status == 404 and request is not None and not isinstance(error, UnknownModel):
            text = f"there is no such path; served are {', '.join(paths(request))}"
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    body = {"message": text, "type": "server_error" if status >= 500 else kind, "code": code, "param": param}
    wait_s = math.ceil(getattr(error, "retry_after_s", None) or 1)
    return JSONResponse({"error": body}, status, {"Retry-After": f"{wait_s}"} if status in (429, 503) else None)


def key_of(request: Request, keys: Set[bytes]) -> bytes:
    """Return the hash of the key of a request. Raises 401 if it is none of the keys, 403 if a page may have sent it."""
    key = hashlib.sha256(request.headers.get("Authorization", "").removeprefix("Bearer ").encode()).digest()
    if keys and key not in keys:
        raise HTTPException(401, "an API key is required: Authorization: Bearer KEY")
    if not keys and is_foreign(request):
        raise HTTPException(403, "web pages of other sites are served by API key alone")
    return key


def is_foreign(request: Request) -> bool:
    """Return whether a page of another site may have sent a request, by its name, which can lead to this machine too.

    A browser reaches addresses that only this machine reaches. Without keys, any page could use the model. Browsers say
    where a POST comes from: its ``Origin`` must be the host that it is sent to, and no name with a dot, which may lead
    to this machine since the page was loaded. Programs send no ``Origin``, and may use any name.
    """
    host = request.headers.get("host", "")
    try:
        is_other = any(not is_at(origin, host) for origin in request.headers.getlist("origin"))
    except ValueError:  # a port that is no number, half a bracket
        return True
    return is_other or request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def is_at(origin: str, host: str) -> bool:
    """Return whether an origin is a host, by address or a name without a dot; either may leave out the usual port."""
    page, served = urlsplit(origin), urlsplit(f"//{host}")
    port, name = PORTS.get(page.scheme), page.hostname or "."
    if (name, page.port or port) != (served.hostname, served.port or port):
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return "." not in name


def digests(messages: list[Json]) -> list[bytes]:
    """Return the SHA-256 of each beginning of a conversation: canonical JSON, a line for each message."""
    running, found = hashlib.sha256(), list[bytes]()
    for message in messages:
        running.update(json.dumps(message, sort_keys=True, separators=(",", ":")).encode() + b"\n")
        found.append(running.digest())
    return found


async def body_of(request: Request) -> Any:
    """Return the JSON object of a request. Raises 413 if it is too large, and ValueError if it is none."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"a request may have {MAX_BODY_BYTES} bytes")
    try:
        value = json.loads(bytes(body))
    except (RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"the body is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the body must be a JSON object, not {str(value)[:20]!r}")
    return value


def check(body: Json) -> None:
    """Raise ValueError for a parameter of another type or out of all bounds; the client checks the rest."""
    biases = body.get("logit_bias", {})
    for name, value in body.items():
        if name in KINDS and type(value) not in TYPES[KINDS[name]]:
            raise ValueError(f"{name} must be {KINDS[name]}")
        if isinstance(value, (list, dict)) and len(value) > MAX_ENTRIES:
            raise ValueError(f"{name} may have {MAX_ENTRIES} entries, not {len(value)}")
        if name != "seed" and isinstance(value, (int, float)) and not abs(value) < BOUND:  # nor NaN
            raise ValueError(f"{name} must be a finite number below {BOUND}")
    for token, bias in biases.items():
        if not (token.isdecimal() and len(token) <= 10 and int(token) < BOUND):
            raise ValueError(f"logit_bias must be by token ids, not {token[:20]!r}")
        if type(bias) not in TYPES["a number"] or not abs(bias) < BOUND:
            raise ValueError(f"logit_bias of token {token} must be a finite number below {BOUND}")


def check_supported(body: Json) -> None:
    """Raise NotSupported for a parameter that is not served, or that has a value which would change the answer."""
    for name in sorted(body):
        if name not in SERVED:
            raise NotSupported(name)
        if name in NEUTRAL and not any(type(one) is type(body[name]) and one == body[name] for one in NEUTRAL[name]):
            raise NotSupported(name, NEUTRAL[name])


def plain(message: Any, at: str) -> Json:
    """Return a message in its one form: without nulls and empty lists, and with its content as a text.

    The chat template gets its other fields as they are. Raises ValueError if it is malformed, and NotSupported for a
    role or a field that no template knows.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("messages must be objects, each with a text as role")
    if message["role"] not in ROLES:
        text = f"{at}.role must be one of {', '.join(ROLES)}, not {message['role'][:40]!r}"
        raise NotSupported(f"{at}.role", text=text)
    content = message.get("content")
    parts = [{"type": "text", "text": content or ""}] if isinstance(content, str | None) else content
    if not isinstance(parts, list) or not all(is_text(part) for part in parts):
        raise ValueError("the content of a message must be a text or a list of parts of type text")
    role = "system" if message["role"] == "developer" else message["role"]
    kept = {key: value for key, value in message.items() if value not in (None, [])}
    if unknown := sorted(kept.keys() - FIELDS):
        raise NotSupported(f"{at}.{unknown[0][:40]}")
    if not isinstance(kept.get("tool_calls", []), list):
        raise ValueError(f"{at}.tool_calls must be a list")
    return kept | {"role": role, "content": "".join(part["text"] for part in parts)}


def is_text(part: Any) -> bool:
    """Return whether a part of a message's content is text."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


class UnknownModel(HTTPException):
    """A request names another model than the one that is served."""

    param = "model"


class NotSupported(HTTPException):
    """A request has a parameter, or a value of it, that asks for what the gateway cannot do; its name is ``param``."""

    def __init__(self, name: str, accepted: tuple[Any, ...] = (), text: str = "") -> None:
        values = " or ".join(json.dumps(value) for value in accepted)
        advice = f"leave it out or send {values}" if accepted else "leave it out"
        what = f"this value of {name}" if accepted else name
        super().__init__(400, text or f"{what} is not supported: {advice}")
        self.param = name


class Turn:
    """A request: its messages and the arguments of ``generate``, checked."""

    def __init__(self, body: Json, key: bytes) -> None:
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair raises ValueError
        body = {name: value for name, value in body.items() if value is not None}
        check_supported(body)
        if wrong := sorted({"model", "messages"} - body.keys()):
            raise ValueError(f"{wrong[0]} is missing")
        check(body)
        self.key, self.model = key, body["model"]
        self.messages = [plain(message, f"messages[{i}]") for i, message in enumerate(body["messages"])]
        self.stop = [body["stop"]] if isinstance(body.get("stop"), str) else list(body.get("stop", []))
        self.is_seeded, self.is_stream = "seed" in body, bool(body.get("stream"))
        self.has_usage = bool(body.get("stream_options", {}).get("include_usage"))
        self.sampling: Json = {name: body[name] for name in SAMPLING & body.keys()}
        self.sampling["logit_bias"] = {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
        self.sampling["seed"] = body["seed"] % 2**64 if self.is_seeded else None
        self.n, self.max_tokens = body.get("n", 1), body.get("max_completion_tokens", body.get("max_tokens"))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"n must be from 1 to {MAX_CHOICES}")
        if not all(isinstance(text, str) for text in self.stop):
            raise ValueError("stop must be a text or a list of texts")

    @staticmethod
    def check_model(name: str, served: str) -> None:
        """Raise UnknownModel if another model is served."""
        if name != served:
            raise UnknownModel(404, f"the model {name!r} is not served; {served!r} is")

    async def check_written(self, render: Callable[[list[Json]], Awaitable[ChatPrompt]]) -> None:
        """Raise NotSupported if the chat template leaves out the calls of tools, or their results."""
        calls = [place for place, one in enumerate(self.messages) if "tool_calls" in one]
        results = [place for place, one in enumerate(self.messages) if one["role"] == "tool" and one["content"].strip()]
        for places, field in ((calls, "tool_calls"), (results, "content")):
            if not places:
                continue
            whole, without = await render(self.messages), [dict(one) for one in self.messages]
            for place in places:
                del without[place][field]
            with contextlib.suppress(errors.InvalidRequestError):  # the template misses the field, so it reads it
                if (await render(without)).text == whole.text:
                    name = f"messages[{places[0]}].{field}"
                    text = f"the model's chat template leaves {name} out: write it into the text of another message"
                    raise NotSupported(name, text=text)

    @property
    def has_logprobs(self) -> bool:
        """True: log-probabilities were asked for."""
        return bool(self.sampling.get("logprobs"))

    def settings(self, num_prompt: int) -> Json:
        """Return the arguments of ``generate`` after so many tokens; penalties count those that are drawn."""
        policy = sample(**self.sampling, penalty_start=num_prompt)
        return {"max_tokens": self.max_tokens, "n": self.n, "stop": self.stop, "text": True, "policy": policy}


class Rows:
    """Log-probabilities of the tokens of a choice, which wait until the server has returned all of a token's text."""

    def __init__(self, turn: Turn) -> None:
        self._has_stops, self._num_taken, self.waiting = bool(turn.stop), 0, list[Json]()

    def take(self, text: str) -> list[Json]:
        """Return those of a text so far; a part of a character counts for the text before it."""
        sizes = [0 if row["bytes"] is None else len(row["token"]) for row in self.waiting]
        ends = (self._num_taken + size for size in itertools.accumulate(sizes))
        num = sum(end <= len(text) for end in ends) if self._has_stops else len(sizes)
        self._num_taken += sum(sizes[:num])
        ready, self.waiting = self.waiting[:num], self.waiting[num:]
        return ready


def choice(index: int, rows: list[Json], finish: str | None) -> Json:
    """Return a choice without its text."""
    return {"index": index, "logprobs": {"content": rows} if rows else None, "finish_reason": finish}


async def events(
    turn: Turn, facts: Json, usage: Json, choices: AsyncIterator[tuple[str, Json]]
) -> AsyncGenerator[str, None]:
    """Yield a completion as server-sent events; an error ends it as the last one."""
    begun = set[int]()
    try:
        async for text, one in choices:
            delta = {"content": text} if one["index"] in begun else {"role": "assistant", "content": text}
            begun.add(one["index"])
            yield f"data: {json.dumps({**facts, 'choices': [{**one, 'delta': delta}]})}\n\n"
        if turn.has_usage:
            yield f"data: {json.dumps({**facts, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield f"data: {bytes((await refuse(None, error)).body).decode()}\n\n"
        if not isinstance(error, FerruleError):
            raise  # it is logged


class Events(StreamingResponse):
    """A completion as server-sent events; its choices end with it, also if a client hangs up that did not read."""

    def __init__(self, turn: Turn, facts: Json, usage: Json, choices: AsyncGenerator[tuple[str, Json], None]) -> None:
        self._sources = events(turn, facts, usage, choices), choices
        super().__init__(self._sources[0], media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then close what they come from. A client that takes none for ``STALL_S`` is cut off."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            _LOG.warning("stream cut off: its client has not read for %g s", STALL_S)
        finally:
            for source in self._sources:
                await source.aclose()


async def until_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return what the work returns; if the client hangs up first, cancel it."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(hang_up())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else Response(status_code=499)
    finally:
        for task in tasks:
            task.cancel()
