"""L3 on Redis or Valkey, one server or a cluster.

A page is one string value, header and payload, under ``<prefix><32 bytes>``. Connections and TLS are the event loop's;
what is said over them is our own: pages go from the transport into their buffers without a copy in between, which no
client library does. ``resp`` is the protocol, without I/O; ``connection`` makes connections and is the only place that
moves bytes; ``routing`` has the connections to each server and knows which server has which key; ``catalog`` goes
through all keys; ``backend`` ties them together and has the laws.
"""

from __future__ import annotations

from asynccache_backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
