"""The store on a local disk. It needs no server and no other package.

Pages lie in segment files in one folder, which are appended to and never changed in place. An index in memory says
where each key's page lies. ``segments`` has their format and those that are open, ``state`` the index, ``files``
moves the bytes of pages, and ``backend`` puts them together and names the laws.
"""

from __future__ import annotations

from asynccache_backends.file.backend import FileBackend

__all__ = ["FileBackend"]
