"""What moves bytes: a worker has the pools of a device and of the host, the streams between them, and the stores.

The cache's head (``asynccache.runtime``) decides through the core and hands *work* to a worker; outcomes come back.
Both are values of integers and bytes (``contract``). A worker knows pools, slots and hashes; it knows no tree, no lease
and no request.
"""
