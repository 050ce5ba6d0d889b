"""The backend ``host:``: memory and stores of a host process, ``asynccache serve``, on the same machine.

``backend`` copies pages from and to the shared memory, ``connection`` speaks to the server, ``mapping`` is that memory
as this process sees it.
"""

from asynccache_backends.host.backend import HostBackend, HostSettings

__all__ = ["HostBackend", "HostSettings"]
