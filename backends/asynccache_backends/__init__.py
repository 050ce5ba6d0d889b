"""Storage backends, each a module or package that is found by its entry point. Of asynccache they import
``asynccache.storage`` and small modules beside it (``errors``, ``settings``, ``settle``, ``redaction``, ``extras``),
and for ``host:`` the messages of the host process. They import nothing of the core, the workers or the runtime."""
