"""The command ``asynccache``: runs the subcommand, and turns an error into one sentence and an exit status.

Exit status: 0 all was well; 1 something was wrong with the cache or the run; 2 the input could not be used; 3 a bug in
asynccache (``--debug``, or ``ASYNCCACHE_DEBUG=1``, shows where); 130 the command was interrupted by Ctrl-C, and 143 by
SIGTERM (``entry``).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from asynccache import __version__, compiled
from asynccache.checks import nearest
from asynccache.cli.output import check_writable, debugging
from asynccache.errors import AsyncCacheError, ConfigError
from asynccache.extras import without_torch

BUG = 3
_NO_REPORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*:|.*\.toml$")
COMMANDS = {
    "replay": ("stress", "serve the requests of a recorded trace, and verify every page"),
    "stress": ("stress", "serve made-up conversations, with faults and cancellations if wanted, and verify every "
                          "page"),
    "serve": ("serve", "own host memory and stores of this machine, for all engines on it, which reach them as "
                       "host:PATH"),
    "store": ("store", "show what a store holds, look for damaged pages, and remove pages"),
    "config": ("config", "show which settings are in effect and where they come from; check a file; print what a file "
                         "may say, or what vLLM and SGLang need on their command line"),
    "plan": ("plan", "compute from a recorded trace what each GiB of host memory or disk would save"),
    "explain": ("explain", "ask a running cache where a prompt's pages are, and what ends its match"),
    "verify-engine": ("verify_engine", "ask an OpenAI-compatible server whether it answers from each tier of its KV "
                                       "cache as it does without one"),
    "bench": ("bench", "measure a store: its rates and its CPU time, by size of page"),
    "doctor": ("doctor", "show what this machine has for a cache: Python, torch, extras, the core, memory, the disk, "
                         "and a GPU, whether it can be used and how fast it is"),
}
"""The module of each command, which is imported only when its command runs, and the help text. A module has
``Options``, the settings struct that declares them, and ``execute``."""


class Parser(argparse.ArgumentParser):
    """A parser that answers wrong arguments with one sentence and the way to ``--help``."""

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
        hint = nearest(word, self._option_string_actions) if word.startswith("-") else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n{self.prog} --help shows what can be given\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. ``argv``: the arguments (default: the process's own)."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in given if argument != "--debug"]
    if len(arguments) < len(given):
        os.environ["ASYNCCACHE_DEBUG"] = "1"
    debug = debugging()
    logging.getLogger("asynccache").addHandler(logging.NullHandler())  # reports say what the log would
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed: what is written to it is discarded
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for as long as the process lives
    if "_ARGCOMPLETE" in os.environ:  # set by the shell when somebody presses TAB
        import argcomplete

        argcomplete.autocomplete(_parser(whole=True))  # answers, and ends the process
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()  # here, not at the end of the process, where nobody catches what it raises
        return status
    except AsyncCacheError as error:
        return _refused(str(error), debug)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 1
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        return _refused(f"{named}{error.strerror or error}", debug)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return _refused(f"{arguments[0]} needs torch. {without_torch(error)}", debug)
        _refused(f"{type(error).__name__}: {error}; this is a bug in asynccache, --debug shows where", debug)
        return BUG


def _refused(sentence: str, debug: bool) -> int:
    """Print what is wrong, with the traceback if ``debug``; returns exit status 2."""
    if debug:
        traceback.print_exc()
    for line in sentence.split("\n"):  # a settings file can have several problems
        print(f"asynccache: {line}", file=sys.stderr)
    return 2


def sentence(text: str) -> str:
    """A help text as a sentence of its own."""
    return f"{text[0].upper()}{text[1:]}."


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name not in COMMANDS:
        _parser().parse_args(arguments or ["--help"])
        return 2
    module: Any = import_module(f"asynccache.cli.{COMMANDS[name][0]}")
    parser = Parser(prog=f"asynccache {name}", description=sentence(COMMANDS[name][1]))
    module.Options.add_arguments(parser, name)
    try:
        options = module.Options.read(name, vars(parser.parse_intermixed_args(_own_json(arguments[1:]))))
        for file in ("json", "report"):
            if isinstance(path := getattr(options, file, None), str):
                check_writable(path, f"--{file}")
        status: int = module.execute(options)
    except ConfigError as error:
        raise ConfigError(f"{error}; see asynccache {name} --help") from error
    return status


def _own_json(arguments: list[str]) -> list[str]:
    """The arguments, with ``--json`` made ``--json=-`` before a URL or a settings file: these belong to the command,
    and must not be taken for the file that the JSON goes to."""
    return ["--json=-" if word == "--json" and _NO_REPORT.match(after) else word
            for word, after in zip(arguments, (*arguments[1:], ""), strict=False)]


def _parser(*, whole: bool = False) -> argparse.ArgumentParser:
    """The command's own parser. ``whole``: with the arguments of all commands, which completion needs."""
    parser = Parser(prog="asynccache", description="A hierarchical KV cache for LLM serving: its tools.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error, and have the run's cache "
                        "look for wrong pages; the same as ASYNCCACHE_DEBUG=1")
    parser.add_argument("--version", action="version", version=f"asynccache {__version__}, {compiled.CORE} core")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, add_help=False)
        if whole:
            import_module(f"asynccache.cli.{module}").Options.add_arguments(command, name)
    return parser


if __name__ == "__main__":
    sys.exit(main())
