"""Namespaces as the runtime names them: the digest of each, as of its last invalidation."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.runtime.hashing import namespace_digest


class NamespaceListener(Protocol):
    """A listener that is told the name of each namespace."""

    def name(self, space: bytes, extra_key: str | bytes) -> None: ...


class Namespaces:
    """The namespaces of one cache. Mutable state: how often each was invalidated, and when. ``changes``: how many
    invalidations there were by now, of one or of all. A caller that finds it unchanged need not ask ``valid``."""

    def __init__(self, config: CacheConfig, names: NamespaceListener | None) -> None:
        self.changes = 0
        self._reset_at = 0
        self._outdated_at: dict[str | bytes | None, int] = {}
        self._config = config
        self._names = names
        self._epochs: Counter[str | bytes | None] = Counter()
        self._plain = namespace_digest(config.model, config.page_size)

    def __repr__(self) -> str:
        return f"Namespaces({len(self._epochs)} invalidated, {self.changes} invalidations)"

    def space(self, extra_key: str | bytes | None) -> bytes:
        """The digest of a namespace, as of its last invalidation.

        Raises:
            ConfigError: ``extra_key`` is neither text nor bytes nor None.
        """
        if extra_key is None:
            if not self._epochs:                       # what most requests ask for
                return self._plain
        else:
            checks.namespace("extra_key", extra_key)
        epoch = self._epochs[extra_key] if self._epochs else 0
        space = namespace_digest(self._config.model, self._config.page_size, extra_key, epoch)
        if self._names is not None and extra_key is not None:
            self._names.name(space, extra_key)
        return space

    def valid(self, extra_key: str | bytes | None, since: int) -> bool:
        """Return True if the namespace was not invalidated, alone or with all others, since ``changes`` was
        ``since``."""
        return since >= self._reset_at and since >= self._outdated_at.get(extra_key, 0)

    def reset(self) -> None:
        """From now on what was begun in any namespace is void. Their digests stay."""
        self.changes += 1
        self._reset_at = self.changes

    def outdate(self, extra_key: str | bytes | None) -> bytes:
        """From now on the namespace is another one; the digest that it had. Raises as ``space``."""
        space = self.space(extra_key)
        self._epochs[extra_key] += 1
        self.changes += 1
        self._outdated_at[extra_key] = self.changes
        return space
