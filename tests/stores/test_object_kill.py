"""kill -9 of a writer at any moment: everything whose put had returned is there, and nothing served is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from asynccache.storage import PageKey, Result
from asynccache.testing.backend_suite import page_key
from tests.storage.page_kit import get
from tests.stores.object_store_kit import folder_url, opened
from tests.stores.s3_server import MotoServer

CHILD = Path(__file__).parent / "object_store_child.py"
ROOT = CHILD.parents[2]
BATCH = 10
HIT, MISS = Result.HIT, Result.MISS


def batch_keys(round_: int, batch: int) -> list[PageKey]:
    """The keys of one of the child's batches."""
    return [page_key(f"{round_}/{batch}/{i}", "odd" if i % 5 == 4 else "full") for i in range(BATCH)]


def killed_after(lines: int, url: str, round_: int) -> list[str]:
    """What a child had said when it was killed, some time after that many lines."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    command = [sys.executable, str(CHILD), url, str(round_)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(lines)]
        child.kill()
        return [line for line in (*said, *child.stdout.readlines()) if line.endswith("\n")]


def numbers(said: list[str], word: str) -> set[int]:
    """The batches of which that was said."""
    return {int(line.split()[1]) for line in said if line.startswith(f"{word} ")}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", "folder"])
async def test_what_a_killed_writer_had_stored_is_there(
    place: str, s3_server: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.client_environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.url_at("kill") + "&refresh=0" if place == "s3" else folder_url(tmp_path / "store")
    rng, history = Random(f"kill {place}"), list[list[str]]()
    for round_ in range(3):
        history.append(killed_after(rng.randrange(4, 40), url, round_))
        async with opened(url) as store:
            for earlier, said in enumerate(history):
                for batch in sorted(numbers(said, "put")):
                    results = await get(store, batch_keys(earlier, batch))
                    gone = 3 if batch in numbers(said, "deleted") else 0
                    if batch % 5 == 4 and not gone:    # killed while it deleted
                        assert set(results[3:]) == {HIT}
                    else:
                        assert results == [MISS] * gone + [HIT] * (BATCH - gone)
            assert store.stats()["errors"] == store.stats()["unreadable_packs"] == 0
