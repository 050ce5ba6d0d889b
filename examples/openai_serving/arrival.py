"""HTTP for clients that dawdle: uvicorn waits for a request's head as long as its bytes trickle in, and this does not.

The body has its own deadline, in ``app``.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0
"""Seconds that the head of a request may take, and then its body."""


class Punctual(H11Protocol):
    """Hangs up when a request's head is not there ``PATIENCE`` seconds after the connection was made or, if it was kept
    for another request, after that one's first byte; and at once on a connection beyond ``limit_concurrency``."""

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
