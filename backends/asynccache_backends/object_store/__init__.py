"""L3 on an object store: S3 and what speaks its language, Google Cloud Storage, Azure, or a plain folder.

The cost of an object store is per operation, so pages travel in *packs*: immutable objects of a few MiB, payloads
first, then a footer that says which keys lie where. An index in memory answers for them, and every pack can say its
part of that index again, so there is nothing that a crash could leave inconsistent.

Why packs and an index, and not an object per page found by its key? Against radosgw a page of 256 KiB an object gives a
quarter of the rate of packs, and on real S3 its PUT alone costs more than keeping it for a month; ``exists`` would be a
request per key, where here it is a dict look-up. The price is that what others wrote must be *found*: see ``catalog``.

    names     128-bit names that sort by time            connect   from a URL to a client
    packs     the format of a pack                       client    the requests that are made, and their errors
    index     which keys lie where                       lending   when the client has let go of a buffer
    snapshot  the index, saved                           uploads   from puts to packs
    catalog   finding what others wrote and removed      reads     which range reads answer a get
    keeper    what goes on in the background             fetches   making them
    collect   ridding the store of waste                 backend   the contract, tied together
"""

from __future__ import annotations

from asynccache_backends.object_store.backend import ObjectBackend

__all__ = ["ObjectBackend"]
