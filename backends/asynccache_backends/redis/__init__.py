"""L3 on Redis or Valkey, one server or a cluster.

A page is one string value, header and payload, under ``<prefix><32 bytes>``. The event loop does connections and TLS.
The protocol is spoken here, without a client library, so that pages go from the transport into their buffers without a
copy in between. ``resp`` is the protocol, without I/O; ``connection`` makes connections and is the only place that
moves bytes; ``routing`` has the connections to each server and knows which server has which key; ``settings`` reads the
URL; ``backend`` ties them together and has the laws.
"""

from __future__ import annotations

from asynccache_backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
