"""The routes: OpenAI's two endpoints, the list of models, health and figures.

Law: each generation has one owner here, which aborts it in the end, whatever the end; a client that has gone ends it
at once, streaming or not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from openai_serving import arrival
from openai_serving.protocol import ApiError, Ask, Json, parse
from openai_serving.service import Generation, Service

MAX_BODY = 16 << 20


def build(service: Service) -> Starlette:
    """The application on a service that is open."""
    routes = Routes(service)
    return Starlette(
        routes=[
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/healthz", routes.healthz),
            Route("/statistics", routes.statistics),
            Route("/metrics", routes.metrics),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _no_route, ClientDisconnect: _gone, Exception: _failed},
    )


class Routes:
    """What each URL does."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._card = {"id": service.plan.name, "object": "model", "created": int(time.time()), "owned_by": "asynccache"}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self._card["id"]:
            raise ApiError(404, "no such model", param="model", code="model_not_found")
        return JSONResponse(self._card)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def healthz(self, request: Request) -> Response:
        healthy = self._service.healthy()
        return JSONResponse({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)

    async def statistics(self, request: Request) -> Response:
        return JSONResponse(self._service.statistics())

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        ask = parse(await _body(request), chat=chat)
        answer = Answer(ask, self._service.generate(ask))
        return EventStream(answer) if ask.stream else await _whole(request, answer)


class Answer:
    """A generation in OpenAI's words."""

    def __init__(self, ask: Ask, generation: Generation) -> None:
        self.ask = ask
        self.generation = generation
        kind = "chat.completion" if ask.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid4().hex}",
            "object": f"{kind}.chunk" if ask.chat and ask.stream else kind,
            "created": int(time.time()),
            "model": ask.model,
        }

    def whole(self, text: str) -> Json:
        """All of it in one piece."""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.ask.chat else {"text": text}
        return self._with({**said, "finish_reason": self.generation.reason}) | {"usage": self.generation.usage}

    async def chunks(self) -> AsyncIterator[Json]:
        """Piece by piece."""
        if self.ask.chat:
            yield self._chunk(role="assistant", content="")
        async for text in self.generation:
            yield self._chunk(content=text)
        yield self._chunk(reason=self.generation.reason)
        if self.ask.include_usage:
            yield {**self._head, "choices": [], "usage": self.generation.usage}

    def _chunk(self, reason: str | None = None, **delta: str) -> Json:
        said = {"delta": delta} if self.ask.chat else {"text": delta.get("content", "")}
        chunk = self._with({**said, "finish_reason": reason})
        return chunk | {"usage": None} if self.ask.include_usage else chunk

    def _with(self, choice: Mapping[str, Any]) -> Json:
        return {**self._head, "choices": [{"index": 0, "logprobs": None, **choice}]}


class EventStream(StreamingResponse):
    """Server-sent events. A client that goes away has it cancelled, wherever it is."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(_events(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._generation = answer.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancelling it aborts the generation."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.abort()


async def _events(answer: Answer) -> AsyncIterator[str]:
    try:
        async for chunk in answer.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
    except ApiError as error:  # the status has been sent
        yield f"data: {json.dumps(error.body)}\n\n"
    yield "data: [DONE]\n\n"


async def _whole(request: Request, answer: Answer) -> Response:
    """The answer when it is complete. Cancelling it aborts the generation."""
    watch = asyncio.create_task(_abort_when_gone(request, answer.generation))
    try:
        text = "".join([piece async for piece in answer.generation])
        return JSONResponse(answer.whole(text))
    finally:
        watch.cancel()
        answer.generation.abort()


async def _abort_when_gone(request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.abort()


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


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    """A bug. uvicorn logs it."""
    told = ApiError(500, f"internal error: {type(error).__name__}", kind="server_error")
    return JSONResponse(told.body, told.status)
