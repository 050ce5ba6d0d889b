"""A core whose calls are written into a chain, with their arguments and what they answered.

Ranks that hold the same tree have made the same calls in the same order; the chain is how they tell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from asynccache.core.cache import CacheCore
from asynccache.core.settings import CoreConfig

CALLS = (
    "match", "lease", "extend", "advance", "truncate", "commit", "release", "prefetch_open", "prefetch_take_full",
    "prefetch_take_aux", "prefetch_commit", "prefetch_revoke", "claim", "confirm_claim", "drop_claim", "complete",
    "follow_up", "drain", "invalidate", "attach_storage", "detach_storage", "note_late_storage",
)  # fmt: skip


Record = Callable[[str, bytes, bytes], None]


def recorded(config: CoreConfig, record: Record) -> CacheCore:
    """A core of which ``record`` hears every call that may change it."""
    core = CacheCore(config)
    for name in CALLS:
        setattr(core, name, _recorded(name, getattr(core, name), record))
    return core


def _recorded(name: str, call: Callable[..., Any], record: Record) -> Callable[..., Any]:
    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arguments = _bytes_of((args, tuple(kwargs.items())))  # which the call may change
        result: object = None
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            result = type(error).__name__
            raise
        finally:
            record(name, arguments, _bytes_of(result))
        return result

    return wrapped


def _bytes_of(value: object) -> bytes:
    return b"\0".join(_flat(value, []))


def _flat(value: object, parts: list[bytes]) -> list[bytes]:
    """The bytes of a call's values; whatever is equal on two ranks gives equal bytes."""
    if type(value) is bytes:
        parts.append(value)
    elif isinstance(value, (tuple, list)):
        parts.append(b"(%d" % len(value))
        for part in value:
            _flat(part, parts)
    else:
        parts.append(repr(value).encode())
    return parts
