"""Ranks that share one Redis: each writes its own shards, one writes for all what is replicated, and a new group of
processes finds both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.rank_runs import PP2, TP2, Shape, hits, run, sound
from tests.cli.test_cli_rank_processes import FEW
from tests.stores.redis_server import RedisServer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "more"), [(TP2, ("--replicated", "full:tp,mamba")), pytest.param(PP2, (), marks=pytest.mark.soak)],
    ids=["tp2-replicated", "pp2"],
)  # fmt: skip
def test_a_new_group_finds_what_ranks_have_stored_together(
    shape: Shape, more: tuple[str, ...], redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.say("FLUSHALL")
    out = tmp_path / "report.json"
    first, second = (run(shape, redis_server.url, out, "--requests", count, *more) for count in ("60", FEW))
    for report in (first, second):
        sound(report, shape)
    hits(second, "storage")
    if more:                                           # SWA alone has a copy for each rank
        stored = first["stores"]["redis"]
        assert stored["put_pages"] < 2 * first["stages"]["backup_storage"]["pages"], stored
