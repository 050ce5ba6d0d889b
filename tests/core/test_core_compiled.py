"""Laws that a compiler could break, slots against a list, questions in slices."""

from __future__ import annotations

import ast
import copy
import linecache
import pickle
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asynccache import compiled
from asynccache.core import settings
from asynccache.core.cache import CacheCore, Grant, LeaseRequest
from asynccache.core.eviction import EvictionPolicy
from asynccache.core.ledger import SlotPool
from asynccache.core.passes import Listed, Listing
from asynccache.core.plan import Clone, Compute, More, Outcome, Status
from asynccache.core.settings import SLICE_STEPS
from asynccache.core.tree import Node, Root
from asynccache.errors import CacheFull, ConfigError, InvariantViolation
from tests.core import core_kit
from tests.core.core_kit import granted, insert, reach, saved, whole
from tests.simulated.synchronous import SPACE, SynchronousRuntime, core_config, spell

# Laws that a compiler could break. They hold for the source and for the modules that are compiled from it.
#
# ``pytest --core compiled`` runs them, and all other tests of the core, on the compiled one.


ROOT = Path(compiled.PACKAGE).parent


def runtime(**options: Any) -> SynchronousRuntime:
    return core_kit.runtime(**{"device": 12, "host": 0, **options})


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


def test_stamps_may_be_larger_than_a_machine_word() -> None:
    run = runtime()
    for power, text in ((50, "abcd"), (62, "efgh"), (64, "ijkl"), (80, "mnop")):
        run.core.at(2.0**power / 1e6)
        run.insert(text)
        run.audit(idle=True)
    assert reach(run, "abcd", "efgh", "ijkl", "mnop") == [0, 4, 4, 4]
    assert run.core.world.recency.now >= 2**80


class Refuses(EvictionPolicy):
    def choose(self, *orders: Any) -> Node | None:
        raise LookupError("of its own")


@pytest.mark.usefixtures("breaks_a_core")
def test_an_exception_of_somebody_elses_policy_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.POLICIES, "refuses", lambda config: Refuses())
    run = runtime(eviction="refuses")
    insert(run, "abcd", "efgh", "ijkl")
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


# what a compiler may change: identity, order, large integers

OBJECTS = {
    "node": "Node", "root": "Root", "end": "Node", "above": "Node", "suffix": "Node", "covered": "Node",
    "op": "Operation", "failed": "Operation", "part": "a slice of a queue", "wanted": "a queue", "place": "Place",
    "cost_then": "Cost", "ghost": "a tuple of any length, which the compiler leaves as it is",
}  # fmt: skip
"""Names by which the compiled modules compare identity. Each stands for objects of a class that is no value: nothing
makes a second one that is equal, or takes it apart."""
MEMBERS = {"Access", "Begin", "ComponentKind", "Cost", "Room", "Status", "Verdict", "WritePolicy", "kind"}
"""Enumerations whose members are compared by identity; ``kind`` is that of an operation."""
KINDS = {"BACKUP_HOST", "LOAD_BACK", "BACKUP_STORAGE", "CLONE", "PREFETCH", "_SELECTIVE", "_WRITE_BACK",
         "FREE", "SHORT", "SAVING", "SLICE", "EXPENDABLE", "OUTDONE", "UNSAVED", "OPEN"}  # fmt: skip
"""Members of enumerations that have a name of their own."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Every module that is compiled."""
    core = sorted((ROOT / "asynccache" / "core").rglob("*.py"))
    for path in (*core, *(Path(compiled.source_of(name)) for name in compiled.ALSO)):
        yield path, ast.parse(path.read_text("utf-8"))


def identities(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The two sides of each ``is`` and ``is not``, and the argument of each ``id()`` twice."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            yield from ((left, right) for op, left, right in zip(node.ops, sides, sides[1:], strict=False)
                        if isinstance(op, ast.Is | ast.IsNot))  # fmt: skip
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id":
            yield node.args[0], node.args[0]


def has_identity(side: ast.expr) -> bool:
    """Whether this is None, a bool, a member of an enumeration, or an object of ``OBJECTS``."""
    if isinstance(side, ast.Constant):
        return side.value is None or isinstance(side.value, bool)
    if isinstance(side, ast.Attribute):
        owner = ast.unparse(side.value).split(".")[-1]
        return owner in MEMBERS or side.attr in OBJECTS or side.attr == "kind"
    return isinstance(side, ast.Name) and (side.id in OBJECTS or side.id in KINDS)


def test_identity_is_asked_of_objects_and_never_of_values() -> None:
    """A compiler makes and unpacks tuples and integers as it likes, so two that are equal may be one or two."""
    wrong = [f"{path.name}:{left.lineno}: {ast.unparse(left)} is {ast.unparse(right)}"
             for path, tree in trees() if path.name != "audit.py"
             for left, right in identities(tree)
             if not (has_identity(left) or has_identity(right))]  # fmt: skip
    allowed = {"id(child)", "id(parent)"}
    assert [line for line in wrong if f"id({line.rsplit(' is ', 1)[1]})" not in allowed] == []


def test_only_places_in_line_have_an_order_and_comparing_them_cannot_fail() -> None:
    """What an exception in ``__lt__`` becomes is a compiler's choice. So sorting meets numbers and tuples of them, and
    objects of one class, which compares two integers."""
    orders = ("__lt__", "__le__", "__gt__", "__ge__")
    found = [(path.name, ast.unparse(node.body[-1])) for path, tree in trees() for node in ast.walk(tree)
             if isinstance(node, ast.FunctionDef) and node.name in orders]  # fmt: skip
    made = [(path.name, node.name) for path, tree in trees() for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and any("order" in ast.unparse(one) for one in node.decorator_list)]
    assert (found, made) == ([("driver.py", "return self.ticket < other.ticket")], [])


@pytest.mark.parametrize("number", [2**62, 2**63 - 1, 2**63, 2**64, 2**80])
def test_numbers_may_be_larger_than_a_machine_word(number: int) -> None:
    """Limits go as far as there is something, what is too much is refused, and nothing changes for it."""
    run = runtime()
    run.insert("abcd")
    core, key = run.core, spell("abcd")
    want = run.ask(key, limit=16)
    with pytest.raises(CacheFull, match=f"full: {number} tokens are asked for"):
        core.lease(want._replace(reserve=number))
    with pytest.raises(InvariantViolation, match=f"an outcome for operation {number}, which is not waiting"):
        core.complete([Outcome(number, Status.DONE)])
    for limits in (("limit",), ("reserve_swa",), ("chunk", "chunk_swa"), ("shared",)):
        more: Any = dict.fromkeys(limits, number)
        grant: Any = core.lease(want._replace(**more))
        assert grant.lease.cached == 16, limits
        assert type(core.extend(grant.lease, number, number)).__name__ == "Wait"
        core.advance(grant.lease, number)
        core.truncate(grant.lease, number)
        core.release(grant.lease)


# SlotPool against a plain list: the same multiset of slots whatever is taken and given, and none twice.


def numbers(slots: bytes) -> list[int]:
    return list(memoryview(slots).cast("i"))


@pytest.mark.parametrize("capacity", [0, 1, 255, 256, 257, 1000])
def test_every_slot_is_either_free_or_taken_once(capacity: int) -> None:
    random, pool = Random(capacity), SlotPool(capacity)
    held: list[bytes] = []
    for _ in range(400):
        if held and random.random() < 0.5:
            run = held.pop(random.randrange(len(held)))
            at = 4 * random.randrange(len(run) // 4 + 1)
            pool.give(run[:at])
            pool.give(run[at:])
        else:
            held.append(pool.take(random.randrange(min(pool.left, 300) + 1)))
        taken = [slot for run in held for slot in numbers(run)]
        assert sorted(taken + list(pool.free())) == list(range(capacity))
        assert pool.left == capacity - len(taken)


def test_what_was_given_back_last_is_taken_first_and_in_order() -> None:
    pool = SlotPool(600)
    first, second = pool.take(40), pool.take(40)
    pool.give(first)
    pool.give(second)
    assert pool.take(40) == second
    assert pool.take(40) == first


def test_single_slots_that_come_back_do_not_pile_up_as_single_runs() -> None:
    pool = SlotPool(4096)
    slots = numbers(pool.take(4096))
    Random(1).shuffle(slots)
    for slot in slots:
        pool.give(slot.to_bytes(4, "little"))
    assert len(pool._runs) <= 4096 // 8


def test_more_than_there_are_is_a_bug_and_takes_nothing() -> None:
    pool = SlotPool(10)
    with pytest.raises(InvariantViolation, match="took 11 slots, 10 are free"):
        pool.take(11)
    assert pool.left == 10


# Questions to every node come in slices, and are right also when nodes leave between two.


TEXTS = 2 * SLICE_STEPS + 1


def wide() -> SynchronousRuntime:
    """So many nodes that one slice does not do."""
    run = runtime(device=2 * TEXTS, host=64, publish=False, write_policy="write_back")
    run.audit = lambda idle=False: None  # type: ignore[method-assign]
    insert(run, *(chr(1000 + i) for i in range(TEXTS)))
    return run


def test_what_is_unsaved_is_counted_in_slices() -> None:
    survey = wide().core.survey()
    slices = 1
    while isinstance(answer := survey.unsaved(), More):
        slices += 1
    assert slices >= 3
    assert answer == (TEXTS, 0)


def listed(run: SynchronousRuntime, listing: Listing) -> Listed:
    while isinstance(answer := listing.some(), More):
        run.perform(answer.plan)
    return answer


def test_all_pages_are_listed_in_slices_also_those_that_leave_between_them() -> None:
    run = wide()
    listing = run.core.listing(SPACE)
    assert isinstance(listing.some(), More)
    while isinstance(run.core.invalidate(SPACE), More):
        pass
    answer = listed(run, listing)
    assert sorted(answer.hashes) == sorted(run.chain(SPACE, spell(chr(1000 + i)))[0] for i in range(TEXTS))
    assert answer.writes == set()
    assert listed(run, run.core.listing(b"other".ljust(32))) == ([], set())


def test_pages_of_a_batch_that_fails_while_they_are_listed_are_on_the_list() -> None:
    """A backup may have written them already."""
    run = runtime(host=64)
    batch = granted(run, "abcd")
    batch.compute(4 * run.page, True)
    assert batch.commit(computed=False)
    listing = run.core.listing(SPACE)
    run.tell(*run.in_flight(Compute))
    assert len(listed(run, listing).hashes) == 4


def test_a_walk_visits_the_upper_piece_of_a_node_that_splits_though_the_lower_one_leaves() -> None:
    run = runtime(device=32)
    saved(run, "abcdef")
    survey = run.core.survey()  # the walk has found the node, and has not visited it
    saved(run, "abcX")
    lower = run.core.world.find(SPACE, spell("abcdef"))[0][-1]
    run.core._transfers.room.evict(lower, 0)
    upper = run.core.world.find(SPACE, spell("abcdef"))[0]
    assert [node.end for node in upper] == [3]
    assert survey.unsaved() == (4, 0)
    run.core.world.plan()


def test_a_probe_copies_nothing() -> None:
    run = core_kit.runtime("full,mamba")
    whole(run, "abcd")
    run.settle()
    for load, clones in ((False, 0), (True, 1)):
        answer = run.core.lease(run.ask(spell("abcdX"))._replace(load=load))
        assert isinstance(answer, Grant)
        assert answer.lease.cached == 16
        assert sum(isinstance(effect, Clone) for effect in answer.plan.effects) == clones
        run.perform(answer.plan)
        run.settle()
        run.perform(run.core.release(answer.lease))
