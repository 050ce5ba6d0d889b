"""Causal language models of transformers with their KV in asynccache's pages.

Each name is imported when it is first asked for. Without transformers (the extra ``hf``) the import raises
``ModuleNotFoundError`` with the command that installs it. With a version of transformers that lacks a name used here,
it raises ``ImportError`` with the same command.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from asynccache.extras import install

if TYPE_CHECKING:
    from asynccache_hf.batches import ContinuousBatching
    from asynccache_hf.cached_model import BatchRequest, Counts
    from asynccache_hf.description import describe
    from asynccache_hf.layout import Layout
    from asynccache_hf.paged import PagedModel
    from asynccache_hf.prefix import PrefixCache

__all__ = [
    "BatchRequest", "ContinuousBatching", "Counts", "Layout", "PagedModel", "PrefixCache", "describe",
]  # fmt: skip

INSTALL = install("hf")
"""The command that installs the packages of the extra ``hf``. It does so in a clone, too."""

_LAZY = {
    "Layout": "layout", "PagedModel": "paged", "PrefixCache": "prefix", "Counts": "cached_model",
    "describe": "description", "ContinuousBatching": "batches", "BatchRequest": "cached_model",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"asynccache_hf.{_LAZY[name]}")
    except (ImportError, AttributeError) as error:
        found_in = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", "")
        if (found_in or "").partition(".")[0] != "transformers":
            raise
        what = "another version of transformers" if find_spec("transformers") else "transformers"
        kind = type(error) if isinstance(error, ImportError) else ImportError
        raise kind(f"{error}; asynccache_hf needs {what}: {INSTALL}", name=found_in) from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
