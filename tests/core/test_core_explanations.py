"""Why a prompt is a hit or a miss: where its pages are, what would be loaded, what ends the match, what became of the
rest. Asking changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.core.match import Explanation
from asynccache.core.plan import BackupHost, BackupStorage, LoadBack
from asynccache.core.settings import ComponentKind
from asynccache.core.tree import Ghosts, Gone, Root
from tests.simulated.synchronous import SPACE, SynchronousRuntime, core_config, spell

FULL, SWA, MAMBA = ComponentKind


def runtime(components: str = "full", **options: Any) -> SynchronousRuntime:
    return SynchronousRuntime(core_config(components, remember=64, **options))


def explained(run: SynchronousRuntime, text: str) -> Explanation:
    return run.core.explain(SPACE, spell(text))


def take(run: SynchronousRuntime, pages: int) -> None:
    """Have so many device pages for a moment."""
    request = run.lease(b"", new=pages * run.page, states=0)
    assert request is not None
    request.release()


def test_nothing_is_known_of_what_was_never_here() -> None:
    found = explained(runtime(), "abc")
    assert (found.length, found.device, found.host, found.full, found.tree) == (12, 0, 0, 0, 0)
    assert (found.runs, found.loads, found.ends, found.gone) == ((), (), FULL, Gone.NEVER)
    assert "never in memory" in found.why


def test_a_whole_prompt_on_the_device() -> None:
    run = runtime(host=0)
    run.insert("abcd")
    found = explained(run, "abcd")
    assert (found.device, found.host, found.ends) == (16, 16, None)
    (part,) = found.runs
    assert (part.start, part.stop, part.whole, part.stored) == (0, 16, True, False)
    assert part.cells[0][:3] == (FULL, "present", "absent")


def test_runs_follow_the_nodes_and_say_what_is_on_its_way() -> None:
    run = runtime()
    run.insert("abcd")
    run.settle()
    run.insert("abxy")
    first, second = explained(run, "abxy").runs
    assert (first.stop, first.cells[0].host, first.stored) == (8, "present", True)
    assert (second.stop, second.cells[0].host, second.stored) == (16, "arriving", False)


def test_what_only_the_host_has_would_be_loaded() -> None:
    run = runtime(device=8)
    run.insert("abcd")
    run.settle()
    take(run, 8)
    found = explained(run, "abcd")
    assert (found.device, found.host, found.ends) == (0, 16, None)
    assert [(load.component, load.pages) for load in found.loads] == [(FULL, 4)]
    request = run.lease(spell("abcdz"))
    assert request is not None
    assert run.in_flight(LoadBack)
    assert explained(run, "abcd").loads == ()


@pytest.mark.parametrize(
    ("host", "storage", "gone"), [(0, False, Gone.DEVICE), (4, False, Gone.HOST), (4, True, Gone.STORED)]
)
def test_from_where_it_was_evicted_is_remembered(host: int, storage: bool, gone: Gone) -> None:
    run = runtime(device=4, host=host, storage=storage)
    run.insert("abcd")
    run.settle()
    take(run, 4)
    run.insert("wxyz")
    run.insert("stuv")
    run.settle()
    found = explained(run, "abcd")
    assert (found.tree, found.gone) == (0, gone)
    assert explained(run, "qqqq").gone is Gone.NEVER


def test_the_middle_of_a_path_remembers_what_hung_below_it() -> None:
    run = runtime(device=8, host=0)
    run.insert("abcd")
    run.insert("abcdefgh")
    take(run, 1)
    found = explained(run, "abcdefgh")
    assert (found.tree, found.gone) == (16, Gone.DEVICE)
    assert explained(run, "abcdxx").gone is Gone.NEVER
    assert explained(run, "abxx").gone is Gone.NEVER


def test_no_state_ends_a_match() -> None:
    run = runtime("full,mamba", host=0)
    run.insert("abcdef", checkpoint=2)
    found = explained(run, "abcdef")
    assert (found.device, found.full, found.ends) == (8, 24, MAMBA)
    assert "from 12 to 24" in found.why


def test_a_hole_in_the_window_ends_a_match() -> None:
    run = runtime("full,swa", device=16, host=0, window=8)
    run.insert("abcd")
    run.insert("abcdefgh")
    answer = run.core.lease(run.ask(b"", states=0)._replace(reserve=0, reserve_swa=14 * run.page))
    run.perform(answer.plan)
    found = explained(run, "abcd")
    assert (found.full, found.host, found.ends) == (16, 0, SWA)
    assert "a window that ends beyond 0 needs what is gone of 8 to 16" in found.why


def test_asking_touches_nothing() -> None:
    run = runtime(device=8, host=0)
    run.insert("abcd")
    run.insert("efgh")
    for _ in range(3):
        explained(run, "abcd")
    take(run, 4)
    assert run.reach("abcd")[0] == 0
    assert run.reach("efgh")[0] == 4


def test_what_is_stored_is_known_once_it_is() -> None:
    run = runtime()
    run.insert("abcd")
    run.complete(*run.in_flight(BackupHost))
    assert not explained(run, "abcd").runs[0].stored
    run.complete(*run.in_flight(BackupStorage))
    assert explained(run, "abcd").runs[0].stored


def test_only_so_many_are_remembered() -> None:
    ghosts, root = Ghosts(8), Root(SPACE, 1)
    for i in range(100):
        ghosts.note(root, bytes([i]) * 4, Gone.HOST)
    known = [i for i in range(100) if ghosts.find(root, bytes([i]) * 4)]
    assert known == list(range(known[0], 100))
    assert 4 <= len(known) <= 8


def test_a_namespace_that_comes_again_is_remembered() -> None:
    """Its root is another one."""
    run = runtime(device=4, host=0)
    run.insert("abcd")
    run.lease(b"", new=4 * run.page, space=bytes(32))
    assert SPACE not in run.core.world.roots
    assert explained(run, "abcd").gone is Gone.DEVICE
