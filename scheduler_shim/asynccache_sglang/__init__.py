"""asynccache's stores as a storage backend of SGLang's HiCache: its L3.

SGLang loads ``asynccache_sglang.storage.AsyncCacheStorage`` when it is started with ``--hicache-storage-backend
dynamic`` and an extra config that names that module and class (docs/engines/sglang.md has the lines to copy). SGLang's
own tree, its L1 and its L2 stay in charge of what is kept; this package moves pages between SGLang's host pools and the
stores.

    options      what the extra config may say, checked
    identity     what must be equal for a stored page to be the right one: the namespace, and a suffix of keys by pool
    hits         how many pages of a prefix can be restored, from what the stores have
    pools        where the pages of a host pool lie, and how they are copied if that is in several places
    rows         memory of our own for pools whose pages lie in several places, lent to calls
    moving       one batch of pages of several pools, to the stores or back, with a deadline
    storage      the class that SGLang calls

Only ``storage`` imports SGLang.
"""
