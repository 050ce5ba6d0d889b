"""asynccache's stores as a storage backend of SGLang's HiCache."""
