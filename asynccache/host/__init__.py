"""The host process, ``asynccache serve``: host memory and stores of one machine, for all engines on it.

Engines reach it by a backend like any other (``host:/run/asynccache.sock``). Messages go over a Unix socket; pages do
not: they lie in shared memory, and clients copy them there and back themselves. So the server never touches a payload,
and has no checksum to compute: the client's ``CheckedStore`` seals a page and verifies it, end to end.

What always holds:
* A page is visible whole or not at all, and whoever reads it verifies it.
* Reads hold nothing. A client copies a page, and then compares the slot's generation: if that has changed, the page was
  evicted meanwhile, and it is a miss.
* A slot that is being written belongs to its process until that publishes it, gives it back or dies (its pidfd says
  so). So a client that is killed at any message leaks nothing and publishes nothing, and one that is stopped keeps its
  slots, which its quota bounds. No time-out can take a slot from under a copy.
* What a client sends is checked before it is used. A client that lies spoils its own hits, or pages that it overwrites,
  and their readers notice.
* Memory is never above what was asked for.

``wire`` is what both sides say, ``memory`` the shared memory and its extents, ``pages`` which page lies where and who
writes, ``session`` the answers to one client, ``server`` the socket, ``behind`` the stores. This package sees
``asynccache.storage`` and nothing of the cache.
"""
