"""``WrappedBackend``, a backend around a backend. A test that changes some calls overrides these in a subclass."""

from asynccache.storage.wrapping import WrappedBackend

__all__ = ["WrappedBackend"]
