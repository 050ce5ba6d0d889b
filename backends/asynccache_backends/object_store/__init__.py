"""The store on object storage: S3 and servers with its protocol, Google Cloud Storage, Azure.

Object storage charges for each operation, so pages are stored in *packs*: immutable objects of a few MiB. A pack has
the payloads first and then a footer, which says which key lies where. An index in memory knows the footers of all
packs. It can be rebuilt from them at any time, so a crash can leave nothing inconsistent.

Why are there packs and an index, and not an object for each page, named by its key? On radosgw objects of one 256-KiB
page reach a quarter of the rate of packs. On S3 the PUT of such an object costs more than storing it for a month. And
``exists`` would be a request for each key, where here it is a look-up in a dict. The price is that a process has to
find the packs of others: see ``catalog``.

    formats   the names and the content of objects,      uploads   puts pages together into packs and sends them
              and the index: which keys lie where        reads     plans and makes the range reads of gets
    client    the client for a URL, its requests and     catalog   finds what others have stored and removed, in the
              their errors                                         background
    backend   the storage contract, on all of these
"""

from __future__ import annotations

from asynccache_backends.object_store.backend import ObjectBackend

__all__ = ["ObjectBackend"]
