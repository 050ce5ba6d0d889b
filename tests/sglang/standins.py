"""Stand-ins for what SGLang imports and a machine without a GPU does not have: Triton and SGLang's own kernels.

They can be imported and decorated with, so that SGLang's modules load; no kernel can be run by them. Streams and events
of a device are replaced by ones that are always done: on the CPU every copy has happened when its call returns.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = ("triton", "sgl_kernel", "tvm_ffi", "torchvision")


class Names(type):
    """A class of which every attribute is its own name, as those of enumerations are."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(types.ModuleType):
    """A package of which every attribute is another one; called, it gives back the function that it decorates."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = Names(name, (), {}) if name[0].isupper() else StandIn(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return lambda function: function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Stream:
    """A stream on which everything is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = None

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def install() -> None:
    """Put the stand-ins where SGLang will look for the real ones; before it is imported, once."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    import torch

    sys.meta_path.append(Finder())  # the last: what is installed is used
    for name, made in {"Stream": Stream, "Event": Event, "stream": _stream, "current_stream": Stream}.items():
        setattr(torch.cpu, name, made)


def _stream(stream: Any) -> Any:
    return stream or Stream()
