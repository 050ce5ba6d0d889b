"""What a compiler could change, and must not: these laws hold for the source and for what is compiled from it.

``pytest --core compiled`` runs them, and all other tests of the core, on the compiled one.
"""

from __future__ import annotations

import copy
import linecache
import pickle
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from asynccache import compiled
from asynccache.core import settings
from asynccache.core.cache import CacheCore, LeaseRequest
from asynccache.core.eviction import EvictionPolicy
from asynccache.core.plan import Outcome, Status
from asynccache.core.tree import Node, Root
from asynccache.errors import ConfigError, InvariantViolation
from tests.simulated.synchronous import SPACE, SynchronousRuntime, core_config, spell

ROOT = Path(compiled.PACKAGE).parent


def runtime(**options: Any) -> SynchronousRuntime:
    return SynchronousRuntime(core_config("full", **{"device": 12, "host": 0, **options}))


def test_all_modules_of_the_core_are_of_the_kind_that_is_said(request: pytest.FixtureRequest) -> None:
    assert request.config.getoption("--core") == compiled.CORE
    core = ROOT / "asynccache" / "core"
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
             for path in core.rglob("*.py")}  # fmt: skip
    loaders = {name: type(import_module(name).__spec__.loader).__name__ for name in names}  # type: ignore[union-attr]
    source = {name for name, loader in loaders.items() if loader == "SourceFileLoader"}
    assert source == (names if compiled.CORE == "pure" else {"asynccache.core", "asynccache.core.keys",
                                                                   "asynccache.core.settings"})  # fmt: skip


def test_an_error_names_the_file_and_the_line() -> None:
    with pytest.raises(InvariantViolation) as raised:
        runtime().core.complete([Outcome(77, Status.DONE)])
    *_, last = traceback.extract_tb(raised.value.__traceback__)
    path = Path(last.filename)
    assert path.parts[-3:-1] == ("asynccache", "core")
    assert last.lineno is not None
    assert linecache.getline(str(ROOT / "asynccache" / "core" / path.name), last.lineno).strip().startswith("raise")


@pytest.mark.parametrize("call", [
    lambda core: core.lease(None),
    lambda core: core.complete([None]),
    lambda core: core.release(None),
    lambda core: core.prefetch_take_full("1", 2),
])  # fmt: skip
def test_an_argument_of_another_type_raises_before_anything_has_changed(call: Any) -> None:
    """Nothing that ``ConfigError`` refuses, so a cache that it happens to is closed."""
    run = runtime()
    run.insert("abcd")
    before = run.core.statistics()
    with pytest.raises((TypeError, AttributeError, KeyError)) as raised:
        call(run.core)
    assert not isinstance(raised.value, ConfigError)
    assert run.core.statistics() == before
    run.audit(idle=True)


def test_stamps_may_be_larger_than_a_machine_word() -> None:
    run = runtime()
    for power, text in ((50, "abcd"), (62, "efgh"), (64, "ijkl"), (80, "mnop")):
        run.core.at(2.0**power / 1e6)
        run.insert(text)
        run.audit(idle=True)
    assert [run.reach(text)[0] for text in ("abcd", "efgh", "ijkl", "mnop")] == [0, 4, 4, 4]
    assert run.core.world.recency.now >= 2**80


class Refuses(EvictionPolicy):
    def choose(self, *orders: Any) -> Node | None:
        raise LookupError("of its own")


def test_an_exception_of_somebody_elses_policy_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.POLICIES, "refuses", lambda config: Refuses())
    run = runtime(eviction="refuses")
    for text in ("abcd", "efgh", "ijkl"):
        run.insert(text)
    with pytest.raises(LookupError, match="of its own") as raised:
        run.insert("mnop")
    files = [Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert files[-1] == Path(__file__).name
    assert {"cache.py", "leases.py", "room.py"} <= set(files)


def test_a_policy_may_say_nothing_but_what_goes() -> None:
    policy = Refuses()
    assert (policy.queues, policy.learns) == (1, False)
    root = Root(SPACE, 1)
    assert (policy.queue(root, 0), policy.recall(root, b"")) == (0, 0)


def test_what_is_no_attribute_cannot_be_set() -> None:
    world = runtime().core.world
    things: list[Any] = [Node(b"", 0, Root(SPACE, 1), 1), world.shelves[0], world.recency]
    for thing in things:
        with pytest.raises(AttributeError):
            thing.nothing_of_the_kind = 1


def test_values_are_equal_by_content_and_can_be_copied_and_pickled() -> None:
    run = runtime()
    run.insert("abcd")
    match = run.match(spell("abcd"))
    for value in (match, LeaseRequest(SPACE, spell("ab"), 4, 4, 4, 0), Outcome(3, Status.FAILED), run.core.statistics(),
                  run.core.config):  # fmt: skip
        for made in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert made == value
            assert type(made) is type(value)
    assert LeaseRequest(SPACE, b"", 1, 1, 1, 0)._replace(load=False).load is False


def test_settings_stay_as_they_were_made() -> None:
    config = core_config("full")
    with pytest.raises(AttributeError):
        config.page_size = 3  # type: ignore[misc]
    assert hash(config) == hash(core_config("full"))


def test_a_core_is_let_go_when_nobody_has_it() -> None:
    """Objects that a compiler made take part in garbage collection."""
    import gc

    def cores() -> int:
        gc.collect()
        return sum(type(thing) is CacheCore for thing in gc.get_objects())

    before = cores()
    run: Any = runtime()
    run.insert("abcd")
    assert cores() == before + 1
    del run
    assert cores() == before
