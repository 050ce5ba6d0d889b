"""Storage backends, each a module or package that is found by its entry point. Of asynccache they import
``asynccache.storage`` and small modules beside it (``errors``, ``settle``, ``redaction``, ``extras``), and nothing of
the core, the workers or the runtime."""
