"""``stress`` and ``replay`` over several ranks: a process of this machine for each, with pools and stores of its own.

The command is the head: it has the cache's core and its requests, as with one rank, and no device. What an engine's
ranks would compute it tells them in batches: which pages to fill and which to verify.

``session`` is a run, ``crew`` its processes, ``rank`` one of them, ``work`` what a batch says; ``engine`` stands where
one rank has its own; ``shard`` is a rank's part of pools and stores.
"""
