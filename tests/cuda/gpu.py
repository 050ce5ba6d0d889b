"""The mark of tests that need a GPU: they say why they are skipped, and never pass without having run."""

from __future__ import annotations

import pytest

from asynccache.memory.cuda.cupy_driver import find

MISSING = find().missing

GPU = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=f"needs a GPU: {MISSING}")]
