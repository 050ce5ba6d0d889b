"""L3 on a Mooncake store: the memory of many machines behind one master.

The client is a C++ library that segfaults when it is misused and holds the GIL in set-up and close. ``client`` is the
only module that touches it, ``shared`` keeps the one that a process has, ``regions`` knows which memory it may read and
write, ``transfers`` makes its blocking calls in threads, ``codes`` says what its numbers mean, ``backend`` is what the
runtime sees.
"""

from __future__ import annotations

from asynccache_backends.mooncake.backend import MooncakeBackend

__all__ = ["MooncakeBackend"]
