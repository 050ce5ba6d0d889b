"""L3 on Redis or Valkey, one server or a cluster.

A page is one string value, header and payload, under ``<prefix><32 bytes>``. The client is our own: pages go from the
socket into their buffers and back without a copy in between, which no client library does. ``resp`` is the protocol,
without I/O, and ``guess`` how many pages are received at once; ``connection`` is the only place that moves bytes, by
``links``; ``connecting`` makes connections; ``node`` has those of one server; ``routing`` knows which server has which
key; ``catalog`` goes through all keys; ``backend`` ties them together and has the laws.
"""

from __future__ import annotations

from asynccache_backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
