"""An OpenAI-compatible gateway: each turn of a chat forks the KV of the turn before, and only its new tokens are run.

For each answer it keeps a handle, by the API key and the digest of the messages up to the answer. The next turn forks
it and appends what the chat template writes after the answer, which is never tokenised again: the model sees it as it
was drawn. If the handle is lost, or the template rewrites what came before, the whole conversation is prefilled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import uvicorn
from openai_form import FINISH, LOST, Events, Json, Rows, Turn, body_of, choice, digests, key_of, refuse, until_gone
from openai_options import api_keys, check_server, connection, parser
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ferrule import AsyncClient, FerruleError, Handle, errors
from ferrule.types import AsyncBranch, AsyncCache, AsyncGeneration, Token

MARK = f"answer-{secrets.token_hex(8)}"  # stands for an answer while the chat template is rendered
DRAW_TTL_S = 15.0  # lease of an answer until it is kept: what a client leaves in flight ends soon
FULL = {"KV_BLOCKS_EXHAUSTED", "QUOTA_HANDLES", "QUOTA_KV_TOKENS"}  # refusals that end when something is released


class Gateway:
    """Handles of answers, least recently used first, each with the end of its answer if that is not in its KV."""

    def __init__(self, client: AsyncClient, keys: set[bytes], max_kept: int, ttl_s: float) -> None:
        self.client, self.keys, self.max_kept, self.ttl_s = client, keys, max_kept, ttl_s
        self.kept: OrderedDict[tuple[bytes, bytes], tuple[Handle, str]] = OrderedDict()
        self.counts = Counter(turns=0, prompt_tokens=0, cached_tokens=0)
        self.texts, self.before = dict[int, str](), list[int]()
        self.rendered = partial(client.apply_chat_template, special_tokens_as_text=True)  # no message can end itself
        self.releases: set[asyncio.Future[Any]] = set()

    def release(self, *gone: AsyncCache | Handle) -> None:
        """Release sequences, which no cancellation stops; if it fails, their leases end them."""
        if gone:
            self.releases.add(task := asyncio.gather(self.client.release(gone), return_exceptions=True))
            task.add_done_callback(self.releases.discard)

    def shrink(self, most: int) -> None:
        """Release what was used least recently, down to so many."""
        self.release(*(self.kept.popitem(last=False)[1][0] for _ in range(len(self.kept) - most)))

    async def answer(self, turn: Turn) -> AsyncGenerator[tuple[str, Json], None]:
        """Yield the usage when the first token is there, then texts of choices; an answer is kept before its end."""
        branches, sent, rows = list[AsyncBranch](), [0] * turn.n, [Rows(turn) for _ in range(turn.n)]
        try:
            generation, num_prompt, num_cached = await self._open(turn)
            branches = generation.branches
            token = await generation.advance()
            num_cached = num_cached or generation.cached_tokens
            usage: Json = {"prompt_tokens": num_prompt, "prompt_tokens_details": {"cached_tokens": num_cached}}
            self.counts.update(turns=1, prompt_tokens=num_prompt, cached_tokens=num_cached)
            yield "", usage
            while token is not None:
                branch, index = branches[token.index], token.index
                if turn.has_logprobs:
                    rows[index].waiting.append(await self._row(token))
                text = branch.text if turn.is_stream and branch.finish_reason is None else ""
                if len(text) > sent[index]:
                    yield text[sent[index] :], choice(index, rows[index].take(text), None)
                    sent[index] = len(text)
                token = await generation.advance()
            for index, branch in enumerate(branches):
                if branch.error is not None:
                    raise branch.error
                text = branch.text
                waiting, num_ends = rows[index].waiting, await self._keep(turn, branch, text)
                ready = waiting[: max(0, len(waiting) - num_ends)]
                yield text[sent[index] :], choice(index, ready, FINISH.get(str(branch.finish_reason), "stop"))
            usage["completion_tokens"] = sum(len(branch.tokens) for branch in branches)
            usage["total_tokens"] = num_prompt + usage["completion_tokens"]
        except errors.ResourceExhaustedError as error:  # what is released helps the client's next try
            can_fit = int(error.metadata.get("needed", 0)) <= int(error.metadata.get("limit", 0))
            if error.reason in FULL and can_fit:
                self.shrink(len(self.kept) // 2)
            raise
        finally:
            self.release(*(one.cache for one in branches if one.has_cache and not one.cache.is_released))

    async def _open(self, turn: Turn) -> tuple[AsyncGeneration, int, int]:
        """Return a generation after the longest known beginning of a conversation, and its tokens in all and cached."""
        for place, digest in reversed(list(enumerate(digests(turn.messages)))):
            name = turn.key, digest
            if (found := self.kept.get(name)) is None:
                continue
            handle, rest = found
            self.kept.move_to_end(name)
            if (new := await self._after(turn.messages, place, rest)) is None:
                continue
            parent = self.client.adopt(handle)  # its forks are kept alive too
            try:
                cache = await parent.fork(ttl=DRAW_TTL_S)
                num_prompt = handle.length + len(new)
                return cache.generate(tokens=new, **turn.settings(num_prompt)), num_prompt, handle.length
            except LOST as error:  # an instance that is not reached may be back at the next turn
                if self.kept.get(name) is found and not isinstance(error, errors.InstanceUnreachableError):
                    self.release(self.kept.pop(name)[0])
            finally:
                parent.detach()
        ids = (await self.rendered(turn.messages)).token_ids
        shares = len(self.keys) < 2  # the prefix cache does not tell the users of a gateway apart
        reuses = shares and not turn.is_seeded  # cached KV may be rounded otherwise
        options: Json = {"ttl": DRAW_TTL_S, "keep": True, "reuse_prefix": reuses, "publish_prefix": shares}
        return self.client.generate(ids, **turn.settings(len(ids)), **options), len(ids), 0

    async def _after(self, messages: list[Json], place: int, rest: str) -> list[int] | None:
        """Return the tokens that follow a kept answer; None: the template rewrites it, or what comes before it."""
        answer = messages[place]["content"]
        before = await self.rendered(messages[:place], add_generation_prompt=False)
        marked = await self.rendered([*messages[:place], {**messages[place], "content": MARK}, *messages[place + 1 :]])
        head, _, tail = marked.text.partition(MARK)
        whole = await self.rendered(messages)
        is_kept = whole.text in (head + answer + tail, head + answer.strip() + tail)  # templates may trim answers
        if not is_kept or not tail or MARK in tail or not head.startswith(before.text):
            return None
        ids, pairs = list(marked.token_ids), zip(reversed(marked.token_ids), reversed(whole.token_ids), strict=False)
        num = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for start in range(len(ids) - num, min(len(ids) - num + 4, len(ids))):
            _, mark, beginning = (await self._text(ids[max(0, start - 2 * len(MARK)) : start])).partition(MARK)
            if mark:  # else the answer ends with tokens of the mark; a token of it may hold the beginning of the tail
                return [*(await self.client.tokenize(rest + beginning) if rest + beginning else ()), *ids[start:]]
        return None

    async def _keep(self, turn: Turn, branch: AsyncBranch, text: str) -> int:
        """Keep the handle of an answer and return how many of the tokens that were drawn are not part of it."""
        cache, tokens, num, rest = branch.cache, branch.tokens, len(branch.tokens), ""
        if branch.finish_reason not in FINISH:  # the last token has ended the answer and is not part of it
            num -= 1
            while not text.startswith(head := await self._text(tokens[:num], skip_special_tokens=True)):
                num -= 1
            rest = text[len(head) :]
        name = turn.key, digests([*turn.messages, {"role": "assistant", "content": text}])[-1]
        with contextlib.suppress(FerruleError):  # an answer that is not kept is prefilled
            if num == len(tokens):
                await cache.append(())  # the pending token
            elif num < len(tokens) - 1:
                await cache.truncate(cache.length + num - len(tokens) + 1)
            (lease,) = await self.client.keep_alive([cache], ttl=self.ttl_s)
            if isinstance(lease, FerruleError):
                raise lease
            if name in self.kept:  # the same answer once more; the older handle may be lost by now
                self.release(self.kept.pop(name)[0])
            self.kept[name] = cache.detach(), rest
            self.shrink(self.max_kept)
        return len(tokens) - num - bool(rest)

    async def _text(self, tokens: list[int], **options: bool) -> str:
        """Return the text of tokens after others: many tokenizers drop a space at the beginning of a text."""
        self.before = self.before or await self.client.tokenize("a")
        return (await self.client.detokenize([*self.before, *tokens], **options)).removeprefix("a")

    async def _row(self, token: Token) -> Json:
        """Return the log-probabilities of a token; bytes are null where the text is a part of a character."""
        pairs = [(int(token), token.logprob), *((one.token, one.logprob) for one in token.top_logprobs)]
        for number in {number for number, _ in pairs} - self.texts.keys():
            self.texts[number] = await self._text([number])
        rows: list[Json] = [{"token": self.texts[number], "logprob": logprob} for number, logprob in pairs]
        for row in rows:
            row["bytes"] = None if "\ufffd" in row["token"] else list(row["token"].encode())
        return {**rows[0], "top_logprobs": rows[1:]}


async def complete(request: Request) -> Response:
    """Answer a conversation."""
    gateway: Gateway = request.app.state.gateway
    key = key_of(request, gateway.keys)
    try:
        turn = Turn(await body_of(request), key)
        gateway.client.generate(0, **turn.settings(0))  # raises what is wrong with them; nothing is sent
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise HTTPException(400, f"malformed request: {error}") from None
    turn.check_model(turn.model, (await gateway.client.model_info()).model_id)
    await turn.check_written(gateway.rendered)
    return await until_gone(request, respond(gateway, turn))


async def respond(gateway: Gateway, turn: Turn) -> Response:
    """Return the answer, or for a stream its beginning."""
    choices = gateway.answer(turn)
    _, usage = await anext(choices)
    facts = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": turn.model}
    if turn.is_stream:
        return Events(turn, {**facts, "object": "chat.completion.chunk"}, usage, choices)
    whole = [{**one, "message": {"role": "assistant", "content": text}} async for text, one in choices]
    return JSONResponse({**facts, "object": "chat.completion", "choices": whole, "usage": usage})


async def models(request: Request) -> Response:
    """Return the one model, in a list unless it is asked for by its name."""
    gateway: Gateway = request.app.state.gateway
    key_of(request, gateway.keys)
    info = await gateway.client.model_info()
    one = {"id": info.model_id, "object": "model", "created": 0, "owned_by": "ferrule"}
    if not (name := request.path_params.get("model")):
        return JSONResponse({"object": "list", "data": [one]})
    Turn.check_model(name, info.model_id)
    return JSONResponse(one)


async def health(request: Request) -> Response:
    """Report whether the server is ready, and what the gateway has counted."""
    gateway: Gateway = request.app.state.gateway
    status = await gateway.client.status(timeout=5)
    facts = {"state": status.state, "conversations": len(gateway.kept), **gateway.counts}
    return JSONResponse(facts, 200 if status.is_ready else 503)


def build(args: argparse.Namespace) -> Starlette:
    """Return the application."""
    settings, keys = connection(args), {hashlib.sha256(key.encode()).digest() for key in api_keys(args)}

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncClient(args.target, **settings) as client:
            app.state.gateway = Gateway(client, keys, args.max_conversations, args.ttl)
            yield
            app.state.gateway.shrink(0)
            await asyncio.gather(*app.state.gateway.releases)

    routes = [Route("/v1/chat/completions", complete, methods=["POST"]), Route("/v1/models", models)]
    routes += [Route("/v1/models/{model:path}", models), Route("/healthz", health)]
    handlers = dict.fromkeys((HTTPException, FerruleError, Exception), refuse)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


if __name__ == "__main__":
    args = parser().parse_args()
    check_server(args)
    uvicorn.run(build(args), host=args.listen[0], port=args.listen[1], timeout_graceful_shutdown=5)
