"""``WrappedBackend``, a backend around a backend. A test that changes some calls overrides these in a subclass."""

from asynccache.storage.wrapper import WrappedBackend

__all__ = ["WrappedBackend"]
