"""L3 on Redis or Valkey, one server or a cluster.

A page is one string value, header and payload, under ``<prefix><32 bytes>``. redis-py connects, signs in and asks for
what is answered by lists. Pages go without it from the transport into their buffers, and back, without a copy in
between. ``resp`` is the protocol for that, without I/O; ``server`` has the connections to one server and is the only
place that moves bytes; ``cluster`` knows which server has which key; ``settings`` reads the URL; ``backend`` ties them
together and has the laws.
"""

from __future__ import annotations

from asynccache.errors import ConfigError
from asynccache.extras import install

try:
    from asynccache_backends.redis.backend import RedisBackend
except ModuleNotFoundError as error:
    raise ConfigError(f"redis:// needs redis-py: {install('redis')} ({error})") from None

__all__ = ["RedisBackend"]
