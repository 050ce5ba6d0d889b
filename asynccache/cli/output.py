"""Writes reports, to a file or standard output, and shows progress. Imports neither torch nor the cache."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
        write(path, "", option, "a")
    elif option != "--json":  # standard output is for the summary or the JSON
        raise ConfigError(f"{option}=-: the page goes to a file only, for example {option} run.html")


def answer(report: Mapping[str, Any], text: str | None, path: str | None) -> None:
    """Print ``text`` (None: nothing), and write ``report`` as JSON to ``path`` if there is one. With "-" the JSON is
    printed in the text's place. Blocking.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path != "-" and text is not None:
        print(text)
    if path is not None and path != "-":
        write(path, json.dumps(report, indent=2) + "\n")
    elif path is not None:
        print(json.dumps(report, indent=2), flush=True)


def write(path: str, text: str, option: str = "--json", mode: str = "w") -> None:
    """Write ``text`` to the file ``path``, which ``option`` named. Blocking.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{option}={path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def progress(stream: TextIO | None = None) -> Iterator[Tell]:
    """Show on ``stream`` (default: standard error) how far a command has come, as long as this lasts: nothing for the
    first two seconds, then one line that is written over again on a terminal and erased at the end, and elsewhere a new
    line every few seconds. Yields what is to be called with a line as often as there is news."""
    out, ended, lines, shown = stream or sys.stderr, threading.Event(), [""], [""]
    again = out.isatty()

    def tell(line: str) -> None:
        lines[0] = line

    def show() -> None:
        wait = QUIET_FOR
        while not ended.wait(wait):
            if (line := lines[0]) != shown[0]:
                shown[0] = line
                out.write(f"\r{line}\x1b[K" if again else f"{line}\n")
                out.flush()
            wait = EVERY if again else 10 * EVERY

    thread = threading.Thread(target=show, name="asynccache-progress", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()
        if again and shown[0]:
            out.write("\r\x1b[K")
            out.flush()
