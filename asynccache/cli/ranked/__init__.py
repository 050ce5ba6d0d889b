"""``stress`` and ``replay`` over several ranks: a process of this machine for each, with pools and stores of its own.

The command's process is the head: it has the cache's core and its requests, as with one rank, and no device. In place
of an engine's computation it sends the ranks batches that say which pages to fill and which to verify.

``ranks`` has the processes of a run, ``__main__``, ``duty`` and ``rank`` the program of each, ``engine`` stands in for
an engine of several ranks, and has what its batches say and a rank's part of pools and stores.
"""
