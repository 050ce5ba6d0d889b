"""A core whose calls are written into a chain, with their arguments and what they answered.

Ranks that hold the same tree have made the same calls in the same order; the chain is how they tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from functools import wraps
from typing import Any

from asynccache.core.cache import CacheCore
from asynccache.core.settings import CoreConfig

CALLS = (
    "match", "lease", "extend", "advance", "truncate", "commit", "release", "prefetch_open", "prefetch_take_full",
    "prefetch_take_aux", "prefetch_commit", "prefetch_revoke", "claim", "confirm_claim", "drop_claim", "complete",
    "drain", "invalidate", "attach_storage", "detach_storage", "note_late_storage",
)  # fmt: skip


def recorded(config: CoreConfig, record: Callable[[str, bytes], None]) -> CacheCore:
    """A core of which ``record`` hears every call that may change it."""
    core = CacheCore(config)
    for name in CALLS:
        setattr(core, name, _recorded(name, getattr(core, name), record))
    return core


def _recorded(name: str, call: Callable[..., Any], record: Callable[[str, bytes], None]) -> Callable[..., Any]:
    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result: object = None
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            result = type(error).__name__
            raise
        finally:
            record(name, b"\0".join(_flat((args, tuple(kwargs.items()), result))))
        return result

    return wrapped


def _flat(value: object) -> Iterator[bytes]:
    """The bytes of a call's values; whatever is equal on two ranks gives equal bytes."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, Enum):
        yield value.name.encode()
    elif isinstance(value, (tuple, list)):
        yield b"(%d" % len(value)
        for part in value:
            yield from _flat(part)
    else:
        yield repr(value).encode()
