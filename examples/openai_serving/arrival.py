"""A deadline for the head of HTTP requests. uvicorn itself has none: it waits as long as single bytes arrive.

The body of a request has its own deadline, in ``app``.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0
"""Seconds that the head of a request may take to arrive, and its body after that."""


class Punctual(H11Protocol):
    """Closes a connection whose request has no complete head within ``PATIENCE`` seconds. The time begins when the
    connection is made; for a further request on the connection, with that request's first byte. Connections beyond
    ``limit_concurrency`` are closed at once."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.close()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(PATIENCE, self.transport.close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
