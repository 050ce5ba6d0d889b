"""The routes: OpenAI's two endpoints, the list of models, health, statistics and metrics, and the cache's explanations.

Law: each generation has one owner in this module, which aborts it in the end, in whatever way the request ends. When
the client is gone, its generation is aborted at once, streaming or not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from itertools import accumulate
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from asynccache import AsyncCacheError, ConfigError
from openai_serving import arrival
from openai_serving.protocol import ApiError, Json, ParsedRequest, Prompt, parse, parse_prompt
from openai_serving.service import Choices, Generation, Service

MAX_BODY = 16 << 20


def build(service: Service) -> Starlette:
    """The application for a service that is open."""
    routes = Routes(service)
    return Starlette(
        routes=[
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/explain", routes.explain, methods=["GET", "POST"]),
            Route("/healthz", routes.healthz),
            Route("/statistics", routes.statistics),
            Route("/metrics", routes.metrics),
        ],
        exception_handlers={
            ApiError: _refused, AsyncCacheError: _no_cache, HTTPException: _no_route, ClientDisconnect: _gone,
            Exception: _failed,
        },
    )


class Routes:
    """The handlers of the URLs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        served = service.served
        self._card = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "asynccache",
                      "max_model_len": served.context}  # fmt: skip

    async def models(self, request: Request) -> Response:
        """The one model. ``kv_blocks`` is not OpenAI's: it tells routers how KV events name the blocks of a prompt."""
        card = {**self._card, "kv_blocks": await self._service.block_names()}
        return JSONResponse({"object": "list", "data": [card]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self._card["id"]:
            raise ApiError(404, "no such model", param="model", code="model_not_found")
        return JSONResponse(self._card)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a prompt or a conversation, in the form of vLLM's route of the same name."""
        prompt, _ = parse_prompt(await _body(request))
        tokens = await self._service.tokens(prompt)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._service.served.context})

    async def explain(self, request: Request) -> Response:
        """The explanation of a prompt, in the form in which ``asynccache.metrics.app`` answers; errors as well."""
        try:
            asked = _in_query(request) if request.method == "GET" else parse_prompt(await _body(request))
            prompt, namespace = asked
            return JSONResponse(await self._service.explain(await self._service.tokens(prompt), namespace))
        except ApiError as error:
            return JSONResponse({"error": str(error)}, error.status)
        except AsyncCacheError as error:
            return JSONResponse({"error": str(error)}, 400 if isinstance(error, ConfigError) else 503)

    async def healthz(self, request: Request) -> Response:
        why = self._service.failure
        return JSONResponse({"status": "ok"} if why is None else {"status": "failed", "error": why},
                            200 if why is None else 503)  # fmt: skip

    async def statistics(self, request: Request) -> Response:
        return JSONResponse(await self._service.statistics())

    async def metrics(self, request: Request) -> Response:
        return Response(await self._service.metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        ask = parse(await _body(request), chat=chat)
        self._service.check_model(ask.model)
        answer = OpenAIAnswer(ask, self._service.generate(ask, await self._service.tokens(ask.prompt)))
        return EventStream(answer) if ask.stream else await _whole(request, answer)


class OpenAIAnswer:
    """The answers to one request in OpenAI's form."""

    def __init__(self, ask: ParsedRequest, choices: Choices) -> None:
        self.ask = ask
        self.choices = choices
        kind = "chat.completion" if ask.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid4().hex}",
            "object": f"{kind}.chunk" if ask.chat and ask.stream else kind,
            "created": int(time.time()),
            "model": ask.model,
        }

    async def whole(self) -> Json:
        """The whole response, when all answers are complete.

        Raises:
            ApiError: an answer failed, or the server is closing.
        """
        texts = [""] * len(self.choices.all)
        async for index, piece in self.choices.pieces():
            texts[index] += piece or ""
        return {**self._head, "choices": [self._said(*each) for each in enumerate(texts)],
                "usage": self.choices.usage}  # fmt: skip

    async def chunks(self) -> AsyncIterator[Json]:
        """The chunks of a streamed response."""
        if self.ask.chat:
            for index in range(len(self.choices.all)):
                yield self._chunk(index, role="assistant", content="")
        async for index, piece in self.choices.pieces():
            if piece is not None:
                yield self._chunk(index, content=piece)
            else:
                yield self._chunk(index, self.choices.all[index].reason)
        if self.ask.include_usage:
            yield {**self._head, "choices": [], "usage": self.choices.usage}

    def _said(self, index: int, text: str) -> Json:
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.ask.chat else {"text": text}
        return {"index": index, "logprobs": self._scores(self.choices.all[index]), **said,
                "finish_reason": self.choices.all[index].reason}  # fmt: skip

    def _scores(self, generation: Generation) -> Json | None:
        """The log-probabilities, in the form of the endpoint."""
        told = generation.told
        if self.ask.top is None:
            return None
        if self.ask.chat:
            return {"content": [{**_scored(text, score.logprob), "top_logprobs": [_scored(*one) for one in top]}
                                for text, score, top in told], "refusal": None}  # fmt: skip
        texts = [text for text, _, _ in told]
        return {"tokens": texts, "token_logprobs": [score.logprob for _, score, _ in told],
                "top_logprobs": [dict(top) for _, _, top in told],
                "text_offset": [0, *accumulate(map(len, texts[:-1]))] if texts else []}  # fmt: skip

    def _chunk(self, index: int, reason: str | None = None, **delta: str) -> Json:
        said = {"delta": delta} if self.ask.chat else {"text": delta.get("content", "")}
        chunk = {**self._head, "choices": [{"index": index, "logprobs": None, **said, "finish_reason": reason}]}
        return chunk | {"usage": None} if self.ask.include_usage else chunk


def _scored(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class EventStream(StreamingResponse):
    """A response of server-sent events. It is cancelled when the client goes away."""

    def __init__(self, answer: OpenAIAnswer) -> None:
        super().__init__(_events(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._choices = answer.choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Cancelling aborts the generation."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.abort()


async def _events(answer: OpenAIAnswer) -> AsyncIterator[str]:
    try:
        async for chunk in answer.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
    except ApiError as error:  # the status has been sent already, so the error goes into the stream
        yield f"data: {json.dumps(error.body)}\n\n"
    yield "data: [DONE]\n\n"


async def _whole(request: Request, answer: OpenAIAnswer) -> Response:
    """The response when the answer is complete. Cancelling aborts the generation."""
    watch = asyncio.create_task(_abort_when_gone(request, answer.choices))
    try:
        return JSONResponse(await answer.whole())
    finally:
        watch.cancel()
        answer.choices.abort()


async def _abort_when_gone(request: Request, choices: Choices) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    choices.abort()


def _in_query(request: Request) -> tuple[Prompt, str | None]:
    """The tokens and the namespace of ``/explain?tokens=1,2,3&namespace=a``.

    Raises:
        ApiError: the tokens are missing or no numbers.
    """
    words = request.query_params.get("tokens", "").replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdecimal() for word in words):
        raise ApiError(400, "tokens: must be numbers, separated by commas")
    return [int(word) for word in words], request.query_params.get("namespace")


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(arrival.PATIENCE):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY:
                    raise ApiError(413, f"the body is larger than {MAX_BODY} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {arrival.PATIENCE:g} s") from None
    return bytes(body)


# errors


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body, error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(told.body, told.status, error.headers)


async def _no_cache(request: Request, error: Exception) -> Response:
    """Answer that the cache is closed or closing."""
    told = ApiError(503, f"not serving: {error}", kind="server_error")
    return JSONResponse(told.body, told.status)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody receives this, because the client is gone


async def _failed(request: Request, error: Exception) -> Response:
    """Answer after a bug; uvicorn logs the error."""
    told = ApiError(500, f"internal error: {type(error).__name__}", kind="server_error")
    return JSONResponse(told.body, told.status)
