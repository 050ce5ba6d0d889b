"""``asynccache store ls|stat|verify|gc|clear URL``: looks at a store, and looks after it.

The answer goes to standard output, as text or JSON. Progress goes to standard error if an action takes longer than two
seconds. This module reads the command line; ``store_actions`` does what it asks for. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asynccache.cli.output import answer, check_writable
from asynccache.cli.parsing import POSITIVE, integer
from asynccache.cli.progress import Progress
from asynccache.cli.store_actions import StoreOptions, perform
from asynccache.cli.store_text import line, text
from asynccache.errors import ConfigError
from asynccache.storage import Stored, parse_size

ACTIONS = {
    "ls": "list every page's key, size and age",
    "stat": "say how much is stored, how old it is, and whether the store answers",
    "verify": "read every stored page, drop and count the damaged ones",
    "gc": "remove what cannot be used any more, and pages older than --older-than",
    "clear": "remove every page",
}
TIMEOUT = 30.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all actions to ``parser``."""
    parser.add_argument("action", choices=list(ACTIONS), metavar="|".join(ACTIONS),
                        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    parser.add_argument("url", metavar="URL", help="the store, for example file:/var/kv")
    parser.add_argument("--limit", type=integer(1), metavar="N", help="ls: list at most N pages")
    parser.add_argument("--rate", metavar="SIZE", help="verify: read at most so many bytes per second, as in 100MiB")
    parser.add_argument("--older-than", metavar="AGE",
                        help="gc: also remove pages that were written longer ago than this, as in 7d or 12h")
    parser.add_argument("--dry-run", action="store_true", help="gc: count the old pages and remove nothing")
    parser.add_argument("--yes", action="store_true", help="clear: do not ask for confirmation")
    parser.add_argument("--timeout", type=POSITIVE, default=TIMEOUT, metavar="SECONDS",
                        help="give up when the store does not answer for so long (default: 30; gc and clear have an "
                             "hour, because they do not report how far they have come)")
    parser.add_argument("--json", metavar="PATH|-",
                        help="write the answer as JSON to a file, or to standard output (-) instead of the text; for "
                             "ls one line for each page, and the total as the last line")


def execute(args: argparse.Namespace) -> int:
    """Run the action and print its answer. Returns the exit status: 1 if anything was damaged or could not be read, or
    if the action was not confirmed.

    Raises:
        ConfigError: an option is unusable, or this kind of store cannot do the action.
        BackendError: the store cannot be opened or read.
    """
    wanted = _wanted(args)
    if args.json is not None:
        check_writable(args.json)
    if args.action == "clear" and not (args.yes or _is_meant(wanted.shown)):
        return 1
    if args.action == "ls" and args.json is not None:
        with _json_lines(args.json) as write:
            report = _performed(wanted, lambda page: write({**page._asdict(), "key": page.key.hex()}))
            write({"total": {name: report[name] for name in ("pages", "bytes", "more")}})
        return 0
    now = time.time()
    report = _performed(wanted, lambda page: print(line(page, now)))
    answer(report, text(report), args.json)
    return 0 if report["ok"] else 1


def _performed(wanted: StoreOptions, show: Callable[[Stored], None]) -> dict[str, object]:
    progress = Progress(sys.stderr)
    try:
        return asyncio.run(perform(wanted, show, progress.tell))
    finally:
        progress.end()


def _wanted(args: argparse.Namespace) -> StoreOptions:
    """The arguments as values.

    Raises:
        ConfigError: an option is unusable, or belongs to another action.
    """
    of = {"limit": "ls", "rate": "verify", "older_than": "gc", "dry_run": "gc", "yes": "clear"}
    for option, action in of.items():
        if getattr(args, option) and args.action != action:
            raise ConfigError(f"--{option.replace('_', '-')} is for asynccache store {action}")
    rate = None if args.rate is None else parse_size("--rate", args.rate)
    older_than = None if args.older_than is None else duration("--older-than", args.older_than)
    if rate is not None and rate < 1:
        raise ConfigError(f"--rate={args.rate!r} must be at least one byte a second")
    if args.dry_run and older_than is None:
        raise ConfigError("--dry-run counts the pages that --older-than would remove: say how old, as in 7d")
    return StoreOptions(args.action, args.url, args.timeout, args.limit, rate, older_than, args.dry_run)


def duration(name: str, text: str) -> float:
    """The seconds that ``text`` says: a number and ``s``, ``m``, ``h``, ``d`` or ``w``.

    Raises:
        ConfigError: ``text`` is no duration; the message begins with ``name``.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}={text!r} is no duration; write for example 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _is_meant(url: str) -> bool:
    """Ask at the terminal whether the store is to be cleared.

    Raises:
        ConfigError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError("clear removes every page: give --yes, because there is no terminal to ask at")
    print(f"Remove every page of {url}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def _json_lines(path: str) -> Iterator[Callable[[object], None]]:
    """What writes a value as a line of JSON to the file ``path``, or for ``-`` to standard output."""
    if path == "-":
        yield lambda value: print(json.dumps(value))
        return
    with open(path, "w", encoding="utf-8") as file:
        yield lambda value: print(json.dumps(value), file=file)
