"""The tests of this folder need the extras that the examples name."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import openai
import torch

from tests.examples.server_kit import Server, settled

torch.set_num_threads(1)


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the module's own ``server``. At the end of each test: nothing is held any more."""
    async with server.client() as client:
        yield client
        await settled(client)
