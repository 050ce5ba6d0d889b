from __future__ import annotations

import pytest

from tests.vllm.engine_kit import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models for vLLM's engine, and what they answer without any tier."""
    return Models(tmp_path_factory.mktemp("models"))
