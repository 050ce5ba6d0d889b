"""A command that gets Ctrl-C, so many times, when it reaches a certain function: ``interrupt_child.py PLACE N ARG...``.

``PLACE``: ``module:Class.function``, ``import:module`` for the moment when that is imported, or ``exit`` for when the
command is over and the interpreter is not.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def press(times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


class AtImport:
    """Presses when ``name`` is looked for, once; finds nothing."""

    def __init__(self, name: str, times: int) -> None:
        self._name, self._times = name, times

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            times, self._times = self._times, 0
            press(times)


def found(place: str) -> tuple[Any, str]:
    """The class or module that has the function ``module:Class.function``, and the function's name there."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def pressing(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """The same function, which presses when it is called for the first time."""
    left = [times]

    @functools.wraps(function)
    def pressed(*arguments: Any, **named: Any) -> Any:
        press(left.pop() if left else 0)
        return function(*arguments, **named)

    return pressed


if __name__ == "__main__":
    place, times, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job has it ignored
    if place == "exit":
        atexit.register(press, int(times))
    elif place.startswith("import:"):
        sys.meta_path.insert(0, AtImport(place.removeprefix("import:"), int(times)))
    else:
        owner, name = found(place)
        setattr(owner, name, pressing(getattr(owner, name), int(times)))
    from asynccache.cli.entry import main

    sys.argv[1:] = arguments
    sys.exit(main())
