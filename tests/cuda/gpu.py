"""The mark of tests that need a GPU: they say why they are skipped, and never pass without having run.

With ``ASYNCCACHE_GPU=required``, as ``make test-gpu`` has it, such a test fails instead (``tests/conftest.py``)."""

from __future__ import annotations

import warnings
from contextlib import suppress
from importlib import import_module

import pytest

from asynccache.memory.cuda.cupy_driver import find

# A warning is an error in tests. One of cupy's, or of what cupy imports, says nothing about the GPU.
with warnings.catch_warnings(), suppress(Exception):  # ``find`` says what is wrong
    warnings.simplefilter("ignore")
    import_module("cupy")

MISSING = find().missing

GPU = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=f"needs a GPU: {MISSING}")]
