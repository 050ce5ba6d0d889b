"""L3 on a local disk: the embedded default.

A folder holds segment files, appended to and never written in place, and an index in memory that says where each key's
page lies. ``blocks`` is the format, ``index`` and ``segments`` the state, ``aio`` the only place that moves page bytes,
``backend`` the one that ties them together. See ``backend`` for the laws.
"""

from __future__ import annotations

from asynccache_backends.file.backend import FileBackend

__all__ = ["FileBackend"]
