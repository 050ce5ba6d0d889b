"""Random worlds as a subscriber and a scraper see them: blocks equal the tree, and every wanted token counts once."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.runtime.cache import AsyncCache
from tests.events.test_events_mirror import Reader, on_tier
from tests.simulated import world


@pytest.mark.parametrize("seed", range(1000, 1016))
def test_a_world_is_seen_as_it_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: dict[int, Reader] = {}
    begin, look = AsyncCache.__init__, world._World._nothing_is_left

    def watched(self: AsyncCache, *args: Any, **options: Any) -> None:
        reader = readers[id(self)] = Reader()
        begin(self, *args, **options, on_event=reader.notices.append)

    def compared(seen: world._World) -> None:
        look(seen)
        blocks = readers[id(seen.cache)].read(seen.cache)
        assert blocks["GPU"] == on_tier(seen.cache, 0)
        assert blocks["CPU"] == on_tier(seen.cache, 1)
        found = seen.cache.statistics().lookups
        assert sum(found.hits.values()) + sum(found.misses.values()) == found.tokens

    monkeypatch.setattr(AsyncCache, "__init__", watched)
    monkeypatch.setattr(world._World, "_nothing_is_left", compared)
    world.play(seed)
    assert readers
