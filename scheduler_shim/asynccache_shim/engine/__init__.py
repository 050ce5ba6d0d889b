"""Runs causal language models of transformers with their caches in asynccache's pages. Extra ``[engine]``."""

from asynccache_shim.engine.describe import describe
from asynccache_shim.engine.generation import Generated, Generator
from asynccache_shim.engine.layout import Layout
from asynccache_shim.engine.paged import PagedModel

__all__ = ["Generated", "Generator", "Layout", "PagedModel", "describe"]
