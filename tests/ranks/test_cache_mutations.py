"""Each rule of the runtime in lockstep is left out once, and worlds of whole caches notice: so they can fail.

A mutation replaces one function of the real code. ``noticed`` plays the worlds in which the rule matters until one of
them fails, and says how: digests that differ, wrong bytes, an error nobody expects, or a world that does not end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from asynccache.config import CacheConfig
from asynccache.core.plan import Outcome, Status
from asynccache.core.settings import PrefetchPolicy
from asynccache.errors import RankDivergence
from asynccache.ranks import NEUTRAL, Counts, Frames, LockstepTurns, Progress, Ranks, Topology
from asynccache.ranks.frames import Header, Health, Kind, Words
from asynccache.runtime import attaching as attaching_module
from asynccache.runtime.door import Door
from asynccache.runtime.driver import Driver
from asynccache.runtime.fetching import Fetch
from asynccache.runtime.lease import Lease
from asynccache.runtime.lockstep import Lockstep, LockstepPhase
from asynccache.runtime.parts import Parts
from asynccache.runtime.prefetching import Prefetching
from asynccache.runtime.publishing import Publishing
from asynccache.runtime.waiting import WaitingEntry
from asynccache.testing.simulated_backend import HONEST
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_world import Climate, WrongBytes, draw_climate
from tests.ranks.cache_world import CacheWorld, Member, Report
from tests.ranks.still_world import StillWorld, publish, serve
from tests.ranks.test_rank_ends import lateness
from tests.ranks.test_rank_keys import asked, filled
from tests.ranks.test_rank_windows import CONFIG, TEXT, gone, key_of, torn

COLUMN, LINE = Topology(tp=2), Topology(pp=3)
SEEDS = range(6)
LIMIT = 600_000

Patch = pytest.MonkeyPatch
World = Callable[[], Report | None]


def climate_of(seed: int) -> Climate:
    """Everything at once, in small pools: windows, sidecars, failures, a store that has what was computed before."""
    drawn = draw_climate(seed)
    config = replace(CONFIG, prefetch_policy=tuple(PrefetchPolicy)[seed % 3], prefetch_timeout_base=0.01)
    hostility = replace(HONEST, delay=0.004, failed=0.05, wrong=0.05)
    faults = replace(drawn.faults, delayed=0.1, failing=0.05, delay=(0.001, 0.01))
    return replace(drawn, config=config, hostility=hostility, faults=faults, latency=0.002, alphabet=2)


def drawn(topology: Topology, seeds: Iterable[int] = SEEDS) -> Iterable[World]:
    """Worlds as they come."""

    async def main(loop: SimulatedLoop) -> Report:
        world = CacheWorld(loop, loop.seed, topology, 20, climate_of(loop.seed))
        world.has_store = True
        world.members = [Member(world, rank) for rank in range(topology.ranks)]
        return await world.run()

    for seed in seeds:
        yield partial(simulate, main, seed, step_limit=LIMIT)


def still(
    before: Callable[[StillWorld], None], topology: Topology = COLUMN, config: CacheConfig = CONFIG, found: int = -1
) -> Iterable[World]:
    """One group stores TEXT; ``before`` happens; a new group asks for it, and gets ``found`` pages of it."""

    async def main(loop: SimulatedLoop) -> None:
        world = StillWorld(loop, topology, config)
        await world.group(lambda member: publish(member, TEXT))
        before(world)
        served = await world.group(lambda member: serve(member, TEXT))
        await world.close()
        assert len({one.state for one in served}) == 1, "trees differ"
        if found >= 0:
            assert {one.hits.storage // config.page_size for one in served} == {found}, "not what was to be found"

    return [lambda: simulate(main, 1, step_limit=LIMIT)]


def noticed(worlds: Iterable[World]) -> str:
    """What the first world that fails fails with."""
    for world in worlds:
        try:
            report = world()
        except (Exception, ExceptionGroup) as error:
            return repr(error)
        if report is not None and report.errors:
            return repr(report.errors)
    raise Unnoticed


class Unnoticed(Exception):
    """Every world went on as if nothing were wrong."""


def lose(pool: str, page: int, damage: Callable[..., None] = torn, rank: int = 1) -> Callable[[StillWorld], None]:
    return lambda world: damage(world.pages, key_of(world.members[rank], pool, page))


# all rules in place


@pytest.mark.ranks
@pytest.mark.parametrize("topology", [COLUMN, LINE])
def test_nothing_is_wrong_with_all_rules_in_place(topology: Topology) -> None:
    with pytest.raises(Unnoticed):
        noticed(drawn(topology))


# what one rank meets


def test_a_failure_here_is_a_report_and_no_outcome(monkeypatch: Patch) -> None:
    plain = Driver.post

    def post(self: Driver, outcome: Outcome) -> None:
        if outcome.status is Status.FAILED:
            self.decide((outcome,))
        else:
            plain(self, outcome)

    monkeypatch.setattr(Driver, "post", post)
    assert noticed(drawn(COLUMN))


def test_an_operation_is_in_the_ledger_from_the_call_that_begins_it(monkeypatch: Patch) -> None:
    plain = Lockstep.opened
    local = Random(1)

    def opened(self: Lockstep, op: int) -> None:
        asyncio.get_running_loop().call_later(local.random() * 0.001, plain, self, op)

    monkeypatch.setattr(Lockstep, "opened", opened)
    assert noticed(drawn(COLUMN))


def test_pages_are_free_when_all_ranks_have_let_go(monkeypatch: Patch) -> None:
    """FAILED below PENDING: one failure would end an operation that others are still at."""
    plain, read = Frames.write, Frames.rows

    def write(self: Frames, kind: Kind, health: Health, header: Header, rows: dict[int, Progress]) -> Words:
        return plain(self, kind, health, header, {op: p._replace(status=(1, 0, 2)[p.status]) for op, p in rows.items()})

    def rows(self: Frames, words: Words) -> dict[int, Progress]:
        return {op: p._replace(status=(1, 0, 2)[p.status]) for op, p in read(self, words).items()}

    monkeypatch.setattr(Frames, "write", write)
    monkeypatch.setattr(Frames, "rows", rows)
    assert noticed(drawn(COLUMN))


def test_a_phase_ends_when_all_ranks_have_let_go(monkeypatch: Patch) -> None:
    """So what a fetch gives back is given back then."""
    plain = LockstepPhase.meet

    async def meet(self: LockstepPhase, counts: Counts) -> Counts:
        mine = tuple(counts.get(name, NEUTRAL) for name in self._lockstep.pools)
        self._lockstep.turns.wake(self._met, self.progress._replace(counts=mine))
        return await plain(self, counts)

    monkeypatch.setattr(LockstepPhase, "meet", meet)
    assert noticed(drawn(COLUMN))


@pytest.mark.ranks
def test_a_cancellation_on_one_rank_only_marks(monkeypatch: Patch) -> None:
    plain = Lease._granted_in_step

    async def granted(self: Lease, entry: WaitingEntry) -> Lease:
        try:
            return await plain(self, entry)
        except asyncio.CancelledError:
            entry.abort()
            raise

    monkeypatch.setattr(Lease, "_granted_in_step", granted)
    assert noticed(drawn(COLUMN))


def test_a_task_that_leaves_a_lease_releases_nothing(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Lease, "_leave", Lease.release)
    assert noticed(drawn(COLUMN))


def test_leases_are_granted_in_steps(monkeypatch: Patch) -> None:
    plain = WaitingEntry.__init__

    def early(self: WaitingEntry, door: Door, *rest: Any) -> None:
        plain(self, door, *rest)
        door.prefetching._spawn(_soon(self), "early")

    async def _soon(self: WaitingEntry) -> None:
        await asyncio.sleep(0)
        if not self.over:
            await self.attempt()

    monkeypatch.setattr(WaitingEntry, "__init__", early)
    assert noticed(drawn(COLUMN, range(12)))  # about a third of all worlds notice


@pytest.mark.ranks
def test_what_retires_is_what_the_engine_named_and_not_what_has_fired(monkeypatch: Patch) -> None:
    plain = Publishing.release

    def release(self: Publishing, after: Any, ended: bool) -> None:
        plain(self, after if after is not None and not after.done() else None, ended)

    monkeypatch.setattr(Publishing, "release", release)
    assert noticed(drawn(COLUMN))


def test_an_open_breaker_is_no_reason_on_one_rank(monkeypatch: Patch) -> None:
    def dies(world: StillWorld) -> None:
        store = world.members[1].backend
        assert store is not None
        store.hostility = replace(store.hostility, unavailable=1.0)

    async def main(loop: SimulatedLoop) -> None:
        world = StillWorld(loop, COLUMN, CONFIG)
        dies(world)

        async def script(member: Member) -> None:
            for number in range(8):
                await serve(member, [number, *TEXT])
            await member.cache.flush()

        await world.group(script)
        await world.close()

    worlds: list[World] = [lambda: simulate(main, 1, step_limit=LIMIT)]
    with pytest.raises(Unnoticed):
        noticed(worlds)

    monkeypatch.setattr(Prefetching, "_storage_is_away", lambda self, space: self._worker.is_away(space))
    assert "Divergence" in noticed(worlds)


# ends


def meets_for_itself(monkeypatch: Patch, where: str) -> None:
    """``where``: the function of a fetch in which ranks agree on nothing: they wait for each other, and each believes
    itself."""
    plain: Any = getattr(Fetch, where)
    meet = LockstepPhase.meet
    at: list[bool] = []

    async def alone(self: LockstepPhase, counts: Counts) -> Counts:
        agreed = await meet(self, counts)
        return counts if at else agreed

    async def mutated(self: Fetch, *args: Any) -> Any:
        at.append(True)
        try:
            return await plain(self, *args)
        finally:
            at.pop()

    monkeypatch.setattr(LockstepPhase, "meet", alone)
    monkeypatch.setattr(Fetch, where, mutated)


def test_the_end_of_full_is_the_agreed_one(monkeypatch: Patch) -> None:
    worlds = still(lose("full", 7), found=7)
    with pytest.raises(Unnoticed):
        noticed(worlds)
    meets_for_itself(monkeypatch, "_read")
    assert noticed(worlds)


def test_no_rank_keeps_a_window_that_another_has_not(monkeypatch: Patch) -> None:
    worlds = still(lose("swa", 6), found=6)
    with pytest.raises(Unnoticed):
        noticed(worlds)
    meets_for_itself(monkeypatch, "_fetch_aux")
    assert noticed(worlds)


def test_host_pages_are_taken_for_the_agreed_count(monkeypatch: Patch) -> None:
    worlds = still(lose("full", 5, gone), found=5)
    with pytest.raises(Unnoticed):
        noticed(worlds)
    meets_for_itself(monkeypatch, "_agree")
    assert noticed(worlds)


@pytest.mark.parametrize("topology", [COLUMN, LINE])
def test_a_pool_that_a_phase_does_not_move_is_neutral(monkeypatch: Patch, topology: Topology) -> None:
    worlds = still(lambda world: None, topology, found=8)
    with pytest.raises(Unnoticed):
        noticed(worlds)
    plain = LockstepPhase.meet

    async def meet(self: LockstepPhase, counts: Counts) -> Counts:
        return await plain(self, {**dict.fromkeys(self._lockstep.pools, 0), **counts})

    monkeypatch.setattr(LockstepPhase, "meet", meet)
    assert "to be found" in noticed(worlds)


# clocks


TIMED = replace(CONFIG, prefetch_policy=PrefetchPolicy.TIMEOUT)


def test_only_the_clocks_of_the_first_stage_count(monkeypatch: Patch) -> None:
    plain = Prefetching.late
    monkeypatch.setattr(Prefetching, "late", lambda self, handle: not _is_first(self) or plain(self, handle))
    worlds = still(lambda world: None, LINE, TIMED, found=8)
    with pytest.raises(Unnoticed):
        noticed(worlds)
    start = Lockstep.__init__

    def clocked(self: Lockstep, *args: Any) -> None:
        start(self, *args)
        self.clocked = True

    monkeypatch.setattr(Lockstep, "__init__", clocked)
    assert "to be found" in noticed(worlds)


def _is_first(prefetching: Prefetching) -> bool:
    lockstep = prefetching._driver.agreement
    assert isinstance(lockstep, Lockstep)
    return lockstep.steps._links.above is None


@pytest.mark.ranks
def test_a_clock_stops_nothing_before_ranks_agree(monkeypatch: Patch) -> None:
    def refresh(self: LockstepPhase) -> None:
        if self._lockstep.clocked and self._late() and not self._stopped:
            self._stopped = True
            self._stop()

    monkeypatch.setattr(LockstepPhase, "refresh", refresh)
    timed = range(tuple(PrefetchPolicy).index(PrefetchPolicy.TIMEOUT), 60, 3)
    assert noticed(drawn(COLUMN, timed))


@pytest.mark.ranks
def test_times_are_numbers_of_steps(monkeypatch: Patch) -> None:
    def call_later(self: LockstepTurns, seconds: float, call: Any, *args: object) -> Any:
        return asyncio.get_running_loop().call_later(seconds, call, *args)

    monkeypatch.setattr(LockstepTurns, "call_later", call_later)
    assert noticed(drawn(COLUMN, range(20)))


# order


def test_players_go_on_in_the_order_in_which_turns_were_earned(monkeypatch: Patch) -> None:
    def wake(self: LockstepTurns, waiter: asyncio.Future[Any], value: object = None) -> None:
        if not waiter.done():
            waiter.set_result(value)

    monkeypatch.setattr(LockstepTurns, "wake", wake)
    assert noticed(drawn(COLUMN))


def test_turns_are_dealt_one_by_one(monkeypatch: Patch) -> None:
    async def run(self: LockstepTurns) -> None:
        self.rounds += 1
        self._make_calls()
        earned, self._earned = list(self._earned), type(self._earned)()
        for waiter, value in earned:
            if not waiter.done() and waiter in self._asleep:
                waiter.set_result(value)

    monkeypatch.setattr(LockstepTurns, "run", run)
    assert noticed(drawn(COLUMN))


# stores


def attaching(loop: SimulatedLoop, broken: int) -> Any:
    """A store that one rank cannot open."""

    async def main() -> list[str]:
        world = StillWorld(loop, COLUMN, CONFIG)

        async def script(member: Member) -> str:
            url = "unheard-of:" if member.rank == broken else member.guest
            said = "attached"
            try:
                await member.cache.attach_storage(url, name="guest")
            except Exception as error:
                said = type(error).__name__
            await serve(member, TEXT)
            await member.cache.flush()
            assert ("guest" in member.cache.stores) == (said == "attached")
            return said

        said = await world.group(script)
        await world.close()
        assert len(set(said)) == 1 or "attached" not in said
        return said

    return main()


def test_a_store_that_one_rank_cannot_open_is_attached_nowhere(monkeypatch: Patch) -> None:
    worlds: list[World] = [lambda: simulate(lambda loop: attaching(loop, 1), 1, step_limit=LIMIT)]
    assert simulate(lambda loop: attaching(loop, 1), 1) == ["Unavailable", "ConfigError"]
    assert simulate(lambda loop: attaching(loop, 7), 1) == ["attached", "attached"]

    async def believes_itself(driver: Driver, what: str, work: Any, *rest: object) -> Any:
        return await work(), None

    monkeypatch.setattr(attaching_module, "on_all", believes_itself)
    assert noticed(worlds)
    with pytest.raises((RankDivergence, AssertionError)):
        simulate(lambda loop: attaching(loop, 1), 1, step_limit=LIMIT)


def test_storage_is_late_when_all_ranks_have_heard_so(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Parts, "_note_late", Parts._tell_late)
    assert "Divergence" in noticed([_lateness])


def _lateness() -> None:
    lateness(COLUMN, slow=1)


def test_a_part_by_tp_is_not_the_same_part_by_cp(monkeypatch: Patch) -> None:
    """What a key without the direction would do: serve another rank's bytes."""

    def shard(ranks: Ranks) -> tuple[int, int]:
        topology, place = ranks.topology, ranks.topology.place(ranks.rank)
        return place.tp + topology.tp * place.cp, topology.tp * topology.cp

    monkeypatch.setattr("asynccache.runtime.cache.shard", shard)
    pages, _ = filled(Topology(tp=2))
    with pytest.raises(WrongBytes):
        asked(Topology(cp=2), pages)
