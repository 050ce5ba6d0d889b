"""The store on a local disk. It needs no server and no other package.

Pages lie in segment files in one folder, which are appended to and never changed in place. An index in memory says
where each key's page lies. ``segments`` has the format of the files and the index, ``log`` appends to them and reclaims
them, and ``backend`` answers calls and names the laws. ``files`` is about plain files, ``folder`` about a store's
options, its locks and its manifest.
"""

from __future__ import annotations

from asynccache_backends.file.backend import FileBackend

__all__ = ["FileBackend"]
