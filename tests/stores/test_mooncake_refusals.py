"""A refusal of the Mooncake store, or of the resolver of names, is an error of the call that met it."""

from __future__ import annotations

import pytest
from asynccache_backends.mooncake import MooncakeBackend

from asynccache.errors import BackendError, ConfigError
from asynccache.storage import parse_url
from asynccache.testing.backend_suite import LAYOUT
from tests.stores.test_mooncake_returns import Scripted, opened


@pytest.mark.parametrize("code", [-1, -600, -706])
async def test_a_clear_that_the_store_refuses_raises(code: int) -> None:
    """Only codes that mean a lost master were looked at."""
    async with opened(Scripted([code])) as backend:
        with pytest.raises(BackendError, match=str(code)):
            await backend.clear()


async def test_a_name_that_no_machine_can_have() -> None:
    with pytest.raises(ConfigError, match=r"a\.\.b"):
        await MooncakeBackend.open(parse_url("mooncake://a..b:1"), LAYOUT)
