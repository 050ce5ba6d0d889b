"""asynccache's stores as a storage backend of SGLang's HiCache: its L3.

SGLang loads ``asynccache_sglang.storage.AsyncCacheStorage`` when it is started with ``--hicache-storage-backend
dynamic`` and an extra config that names that module and class (docs/engines/sglang.md has the lines to copy). SGLang's
own tree decides what its L1 and L2 keep; this package moves pages between SGLang's host pools and the stores.

    options      the options in the extra config, checked
    identity     what must be equal for a stored page to be usable: the namespace, and a suffix of the keys of each pool
    hits         how many pages of a prefix can be restored, given the pages that the stores have
    pools        where the pages of a host pool lie, and how a page that lies in several places is copied
    moves        moves one batch of pages of several pools to the stores or back, with a deadline; has memory for pages
                 that are copied on their way
    storage      the class that SGLang calls

Only ``storage`` imports SGLang.
"""
