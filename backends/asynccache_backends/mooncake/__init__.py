"""The store on Mooncake: the memory of many machines behind one master.

Mooncake's client is a C++ library. It segfaults when it is misused, and holds the GIL while it is set up and closed.
``client`` has the one client of the process, and is the only way to it; the settings in a URL, the memory that it may
read and write, and what the master is asked without it. ``transfers`` makes the client's blocking calls, in threads.
``codes`` says what the client's numbers mean. ``backend`` is the storage contract on all of these.
"""

from __future__ import annotations

from asynccache_backends.mooncake.backend import MooncakeBackend

__all__ = ["MooncakeBackend"]
