"""Writes reports (JSON to a file or standard output, the page with plots to a file) and shows progress. Imports
neither torch nor the cache."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from asynccache.errors import ConfigError

Tell = Callable[[str], None]

QUIET_FOR = 2.0
EVERY = 0.5


def debugging() -> bool:
    """Return whether tracebacks are to be printed: ``ASYNCCACHE_DEBUG`` in the environment, which ``--debug`` sets."""
    return os.environ.get("ASYNCCACHE_DEBUG", "0") not in ("", "0")


def check_writable(path: str, option: str = "--json") -> None:
    """Find out before a run whether its report can be written to ``path``; the file is made if it does not exist.

    Raises:
        ConfigError: it cannot be written.
    """
    if path != "-":
        _write(path, "", "a", option)
    elif option != "--json":  # standard output is for the summary or the JSON
        raise ConfigError(f"{option}=-: the page goes to a file only, for example {option} run.html")


def answer(report: Mapping[str, Any], text: str | None, path: str | None) -> None:
    """Print ``text`` (None: nothing), and write ``report`` as JSON to ``path`` if there is one. With "-" the JSON is
    printed in the text's place.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path != "-" and text is not None:
        print(text)
    if path is not None:
        dump(report, path)


def dump(report: Mapping[str, Any], path: str) -> None:
    """Write JSON to ``path``, or to standard output for ``-``. Blocking, so to be called when no loop runs any more.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(report, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        _write(path, text, "w")


def write_page(report: Mapping[str, Any], path: str) -> None:
    """Write the page with plots of a run's report to ``path``. Blocking.

    Raises:
        ConfigError: the file cannot be written.
    """
    from asynccache.cli.page import page

    _write(path, page(report), "w", "--report")


def _write(path: str, text: str, mode: str, option: str = "--json") -> None:
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{option}={path}: cannot be written: {error.strerror or error}") from None


class Progress:
    """Shows how far a command has come, on ``stream``: nothing for the first two seconds, then one line that is written
    over again on a terminal, and elsewhere a new line every few seconds. Call ``tell`` as often as there is news, and
    ``end`` once. A line that comes too early after the last one is shown later, by a timer, unless a newer line comes
    before that."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._again = stream.isatty()
        self._next = clock() + QUIET_FOR
        self._line = ""
        self._shown = False
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def tell(self, line: str) -> None:
        """Show ``line`` as soon as the last one has been shown for long enough."""
        with self._lock:
            self._line = line
            self._show_in_time()

    def end(self) -> None:
        """Show no more, and on a terminal erase the line that is shown."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._line = ""
            if self._shown and self._again:
                self._stream.write("\r\x1b[K")
                self._stream.flush()
            self._shown = False

    def _late(self) -> None:
        with self._lock:
            self._timer = None
            if self._line:
                self._show_in_time()

    def _show_in_time(self) -> None:
        wait = self._next - self._clock()
        if wait > 0:
            if self._timer is None:
                self._timer = threading.Timer(wait, self._late)
                self._timer.daemon = True
                self._timer.start()
            return
        line, self._line = self._line, ""
        self._next = self._clock() + (EVERY if self._again else 10 * EVERY)
        self._shown = True
        self._stream.write(f"\r{line}\x1b[K" if self._again else f"{line}\n")
        self._stream.flush()
