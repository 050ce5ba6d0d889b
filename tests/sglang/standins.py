"""Stand-ins for what SGLang imports and a machine without a GPU does not have: Triton and SGLang's own kernels.

They can be imported and decorated with, so that SGLang's modules load; no kernel can be run by them. Streams and events
of a device are replaced by ones that are always done: on the CPU every copy has happened when its call returns. Of the
kernels only those that copy rows of device pools to host pools and back are written out, for the CPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

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
    sys.meta_path.append(Finder())  # the last: what is installed is used
    for name, made in {"Stream": Stream, "Event": Event, "stream": _stream, "current_stream": Stream}.items():
        setattr(torch.cpu, name, made)


def _stream(stream: Any) -> Any:
    return stream or Stream()


# copies


Tensors = Sequence[torch.Tensor]
Indices = torch.Tensor


def transfer_kv_direct(
    src_layers: Tensors, dst_layers: Tensors, src_indices: Indices, dst_indices: Indices, page_size: int
) -> None:
    """Rows of each layer to rows of the same layer."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Indices, dst_indices: Indices, page_size: int
) -> None:
    """Rows of each layer to pages that have all layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for at in range(0, len(src_indices), page_size):
        rows, page = src_indices[at : at + page_size], int(dst_indices[at]) // page_size
        for number, src in enumerate(src_ptrs):
            where = dst_ptrs[number // layers][page, number % layers]
            where.copy_(src[rows].reshape(where.shape))


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Indices, dst_indices: Indices, layer_id: int, page_size: int
) -> None:
    """One layer of pages to rows of that layer."""
    for at in range(0, len(src_indices), page_size):
        rows, page = dst_indices[at : at + page_size], int(src_indices[at]) // page_size
        for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
            dst[rows] = src[page, layer_id].reshape(dst[rows].shape)


def install_kernels() -> None:
    """Put the copies where SGLang's host pools look for its kernels; host memory is not pinned."""
    from sglang.srt.mem_cache import memory_pool_host
    from sglang.srt.mem_cache.pool_host import common, mamba, mha, mla

    if common._cuda_host_register is _nothing:
        return
    for module in (memory_pool_host, mamba, mha, mla):
        for function in (transfer_kv_direct, transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
            setattr(module, function.__name__, function)
    common._cuda_host_register = _nothing
    torch.zeros = partial(_unpinned, torch.zeros)


def _nothing(*_: Any) -> None: ...


def _unpinned(zeros: Callable[..., torch.Tensor], *shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
    return zeros(*shape, **more)
