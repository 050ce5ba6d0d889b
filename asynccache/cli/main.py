"""The command ``asynccache``: runs the subcommand, and turns an error into one sentence and an exit status.

Exit status: 0 all was well; 1 something was wrong with the cache or the run; 2 the input could not be used; 3 a bug in
asynccache (``--debug``, or ``ASYNCCACHE_DEBUG=1``, shows where); 130 the command was interrupted by Ctrl-C. SIGTERM
interrupts it as well, and ``entry`` turns that status into 143.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, NoReturn

from asynccache import __version__, compiled
from asynccache.cli.entry import INTERRUPTED
from asynccache.cli.options import add_arguments, resolve_options, suggest
from asynccache.cli.output import debugging
from asynccache.cli.presses import Presses
from asynccache.errors import AsyncCacheError, ConfigError

BUG = 3
_TOOLS = {
    "store": ("show what a store holds, look for damaged pages, and remove pages", True),
    "config": ("show which settings are in effect and where they come from; check a file; print what a file may say",
               True),
    "plan": ("compute from a recorded trace what each GiB of host memory or disk would save", True),
    "explain": ("ask a running cache where a prompt's pages are, and what ends its match", True),
    "bench": ("measure a store: its rates and its CPU time, by size of page", True),
    "doctor": ("show whether this machine has a GPU that can be used, how fast it is, and what the cache will use",
               False),
}
"""Commands that are one module each: the help text, and whether the command needs arguments."""
_COMMANDS: dict[Literal["replay", "stress"], str] = {
    "replay": "serve the requests of a recorded trace, and verify every page",
    "stress": "serve made-up conversations, with faults and cancellations if wanted, and verify every page",
}


class Parser(argparse.ArgumentParser):
    """A parser that answers wrong arguments with one sentence and the way to ``--help``."""

    def error(self, message: str) -> NoReturn:
        words = self.prog.split()
        hint = ""
        if message.startswith("unrecognized arguments: -") and words[-1] in _COMMANDS:
            hint = suggest(words[-1], message.split()[2])
        self.exit(2, f"{self.prog}: {message}{hint}\n{self.prog} --help shows what can be given\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return the value of an option. If a parser of ours refuses the text, raise its own error with the option and
        the text before it, where argparse would only say that the value is invalid."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, ConfigError):
                name = "/".join(action.option_strings) or action.metavar
                raise ConfigError(f"{name}={arg_string}: {error.__context__}") from None
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. ``argv``: the arguments (default: the process's own)."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in given if argument != "--debug"]
    if len(arguments) < len(given):
        os.environ["ASYNCCACHE_DEBUG"] = "1"
    debug = debugging()
    _have_streams()
    if "_ARGCOMPLETE" in os.environ:  # set by the shell when somebody presses TAB
        import argcomplete

        argcomplete.autocomplete(_parser(whole=True))  # answers, and ends the process
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()  # here, not at the end of the process, where nobody catches what it raises
        return status
    except AsyncCacheError as error:
        return _refused(f"{error}{_see(arguments) if isinstance(error, ConfigError) else ''}", debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 1
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        return _refused(f"{named}{error.strerror or error}", debug)
    except Exception as error:
        _refused(f"{type(error).__name__}: {error}; this is a bug in asynccache, --debug shows where", debug)
        return BUG


def _have_streams() -> None:
    """Discard what is written to standard output or error where that is closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for as long as the process lives


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


def _see(arguments: list[str]) -> str:
    command = arguments[0] if arguments and arguments[0] in (*_COMMANDS, *_TOOLS) else ""
    return f"; see asynccache {command} --help" if command else ""


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] and arguments[0] in _TOOLS:
        return _tool(arguments[0], arguments[1:])
    if arguments[:1] and arguments[0] in _COMMANDS:
        return _run(arguments)
    _parser().parse_args(arguments or ["--help"])
    return 2


def _parser(*, whole: bool = False) -> argparse.ArgumentParser:
    """The command's own parser. ``whole``: with the arguments of all commands, which completion needs."""
    parser = Parser(prog="asynccache", description="A hierarchical KV cache for LLM serving: its tools.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (or ASYNCCACHE_DEBUG=1)")
    parser.add_argument("--version", action="version", version=f"asynccache {__version__}, {compiled.CORE} core")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, text in (_COMMANDS | {tool: text for tool, (text, _) in _TOOLS.items()}).items():
        command = commands.add_parser(name, help=text, add_help=False)
        if whole and name in _COMMANDS:
            add_arguments(command, name)
        elif whole:
            import_module(f"asynccache.cli.{name}").add_arguments(command)
    return parser


def _run(arguments: list[str]) -> int:
    name: Literal["replay", "stress"] = "replay" if arguments[0] == "replay" else "stress"
    parser = Parser(prog=f"asynccache {name}", description=sentence(_COMMANDS[name]))
    add_arguments(parser, name)
    settings = resolve_options(name, vars(parser.parse_args(arguments[1:])))
    with Presses() as presses:
        from asynccache.cli.session import execute  # imports torch: --help and wrong input need not wait for that

        return execute(settings, presses)


def _tool(name: str, arguments: list[str]) -> int:
    """Run one of ``_TOOLS``: a module of its own, which is imported only when its command runs."""
    module: Any = import_module(f"asynccache.cli.{name}")
    help_, needs_arguments = _TOOLS[name]
    parser = Parser(prog=f"asynccache {name}", description=sentence(help_))
    module.add_arguments(parser)
    status: int = module.execute(parser.parse_intermixed_args(arguments or (["--help"] if needs_arguments else [])))
    return status


if __name__ == "__main__":
    sys.exit(main())
