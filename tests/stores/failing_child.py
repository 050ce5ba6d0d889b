"""``asynccache stress`` in a process of its own that can be asked how it stands. ``failing`` is the other end.

Its arguments are those of ``stress``. A line on its standard input is answered by a line of JSON: counters of now.
Ctrl-C (SIGINT) ends the run as it does for a user; then the report is printed, with the latency of every request, when
it asked for its pages, when the breaker was not closed, and how many prefetches were begun then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import threading
import time
from typing import Any

from asynccache.cli.options import RunSettings, loop_factory
from asynccache.cli.report import Tally
from asynccache.cli.service import Server
from asynccache.cli.session import Session
from asynccache.cli.workloads import RunRequest
from asynccache.runtime.prefetch import Prefetch, Prefetches
from asynccache.storage import Breaker, BreakerState, Permit

COUNTED = ("get_pages", "corrupt_pages", "breaker_opened")


class Moments:
    """``asked``: when each request asked for its pages, in the order of ``Tally.first_token``. ``changes``: when the
    breaker was not closed any more, and when it was again, in turn. ``fetched``: prefetches begun in between."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.changes: list[float] = []
        self.fetched = 0
        self._came: dict[int, float] = {}

    def watch(self) -> None:
        """Hear of all that happens from now on in this process."""
        leased, prompt, enter, prefetch = Server._leased, Tally.prompt, Breaker._enter, Prefetches.begin

        async def came(server: Server, request: RunRequest, *rest: Any) -> None:
            self._came[request.number] = time.monotonic()
            await leased(server, request, *rest)

        def ready(tally: Tally, request: RunRequest, *rest: Any) -> None:
            self.asked.append(self._came[request.number])
            prompt(tally, request, *rest)

        def entered(breaker: Breaker, state: BreakerState) -> Permit:
            of_a_store = breaker._threshold > 1  # a backend's own opens while there is no room: reads go on
            if of_a_store and (state is BreakerState.CLOSED) is bool(len(self.changes) % 2):
                self.changes.append(time.monotonic())
            return enter(breaker, state)

        def fetching(prefetches: Prefetches, space: bytes, key: bytes) -> Prefetch:
            handle = prefetch(prefetches, space, key)
            self.fetched += bool(len(self.changes) % 2) and not handle.done()
            return handle

        Prefetches.begin = fetching  # type: ignore[assignment, method-assign]
        Server._leased, Tally.prompt, Breaker._enter = came, ready, entered  # type: ignore[assignment, method-assign]


class Watched(Session):
    """A session that says how it stands."""

    def standing(self) -> dict[str, Any]:
        """Counters of now; of any thread."""
        storage = {} if self.cache is None else self.cache.statistics().storage
        return {"served": self.tally.served, "timed": len(self.tally.first_token),
                **{name: storage.get(name, 0) for name in COUNTED}}  # fmt: skip


def main() -> None:
    """Run until Ctrl-C."""
    parser = argparse.ArgumentParser()
    RunSettings.add_arguments(parser, "stress")
    settings: RunSettings = RunSettings.read("stress", {**vars(parser.parse_args()), "quiet": True})
    moments = Moments()
    moments.watch()
    session = Watched(settings)
    threading.Thread(target=_answer, args=(session,), daemon=True).start()
    with asyncio.Runner(loop_factory=loop_factory(settings.loop)) as runner:
        report = runner.run(session.reported())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say({"traceback": None, **report, "first_token": list(session.tally.first_token), "asked": moments.asked,
          "changes": moments.changes, "fetched_while_open": moments.fetched})


def _answer(session: Watched) -> None:
    for _ in sys.stdin:
        _say(session.standing())


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
