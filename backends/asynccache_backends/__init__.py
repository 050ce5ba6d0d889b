"""Storage backends, each a module or package that is found by its entry point. They import the storage contract and
nothing else of asynccache's inside."""
