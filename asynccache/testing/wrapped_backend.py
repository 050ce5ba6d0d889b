"""A backend around a backend, for tests that change some of its calls: subclass it and override those."""

from asynccache.storage.wrapping import WrappedBackend

__all__ = ["WrappedBackend"]
