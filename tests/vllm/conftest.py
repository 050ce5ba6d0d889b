"""vLLM is imported once, before any test, where it is installed: its own warnings are no failures here."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

import pytest

from tests.vllm.engine_kit import Models

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
with warnings.catch_warnings(), suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")
    import_module("vllm.v1.kv_offload.tiering.spec")
    import_module("vllm.plugins").load_general_plugins()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The tier's lines in vLLM's log, which are not passed on to the root logger."""
    logger = logging.getLogger("vllm.asynccache")
    before = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(before)
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models for vLLM's engine, and what they answer without any tier."""
    return Models(tmp_path_factory.mktemp("models"))
