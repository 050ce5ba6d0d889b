"""Workers that are gone, silent, lie or fail: who waits is told, and the group ends or loses that batch."""

from __future__ import annotations

import asyncio
import errno
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
import torch

from asynccache import AsyncCache, BatchFailed, ConfigError, LoadFailed, RankFailure
from asynccache.core.plan import StoredPages
from asynccache.errors import BackendError, Unavailable
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.pools import check_room
from asynccache.storage import Result
from asynccache.worker import EngineBatch, RankWorker, Topology
from asynccache.worker.local import LATE
from asynccache.worker.messages import StoreCounters, StoreHealth
from asynccache.worker.rank_server import ORDERS
from asynccache.worker.work import WriteOrder
from tests.group.group_kit import GUEST, PAGE, GroupWorld, RankDevice, servers, settings, simulated, text
from tests.group.random_worlds import EFFECTS, FATES, Fate
from tests.runtime import runtime_kit
from tests.simulated.device import SimulatedDevice, SimulatedStream
from tests.simulated.loop import SimulatedLoop

# A worker that is gone, silent, or cannot go on: who waits is told which and why, the head closes, the others end.


VICTIM = 1
TIMEOUT = 3.0
ACCIDENTS = FATES | EFFECTS


@pytest.mark.parametrize("fate", [name for name, fate in ACCIDENTS.items() if not fate.all])
@pytest.mark.parametrize("own", [0, None])
@simulated
async def test_who_waits_is_told_of_the_rank_and_the_reason_and_a_new_group_finds_its_stores_warm(
    loop: SimulatedLoop, fate: str, own: int | None
) -> None:
    accident = ACCIDENTS[fate]
    shape = Topology(tp=2) if own == 0 else Topology(tp=3)
    world = GroupWorld(loop, shape, settings(16, 40, mamba=6, stored=True), own=own, timeout=TIMEOUT)
    async with world.opened() as cache:
        await world.serve(text(6))
        await cache.flush()
    world.begin()
    before = asyncio.all_tasks()
    told, struck = await struck_in_use(world, accident)
    assert len(told) >= 2
    assert all(error.rank == VICTIM and accident.reason in error.reason for error in told), told
    assert str(told[-1]).startswith(f"rank {VICTIM}: ")
    assert loop.time() - struck <= 2 * TIMEOUT + 3.0, "the head closes in its time"
    if accident.silences:
        world.process(VICTIM).task.cancel()
    for rank, process in world.group.processes.items():
        if rank != VICTIM:
            await process.ended()
            assert isinstance(process.failure, RankFailure), "the others hear of it"
            assert process.failure.rank == VICTIM
    await asyncio.wait([world.process(VICTIM).task])
    await asyncio.wait(world.running.values())
    assert asyncio.all_tasks() <= before, "a task outlives the group"
    async with world.opened() as cache:
        assert await world.serve(text(6, extra=1), prefetch=cache.prefetch(text(6, extra=1))) == 24
        world.idle()


async def struck_in_use(world: GroupWorld, accident: Fate) -> tuple[list[RankFailure], float]:
    """What those who used the cache were told, and at last who opened it; and when it was struck."""
    cache, loop = world.cache, world.loop
    told: list[BaseException] = []
    struck = 0.0
    try:
        async with cache:
            world.run()
            await world.serve(text(3, seed=1))
            handle = cache.prefetch(text(6, extra=1))
            waiting = [
                loop.create_task(world.serve(text(6, extra=1), prefetch=handle)),
                loop.create_task(cache.flush()),
            ]
            await asyncio.sleep(0)
            accident.strike(world, VICTIM)
            struck = loop.time()
            waiting.append(loop.create_task(until_closed(world)))
            told += [error for error in await asyncio.gather(*waiting, return_exceptions=True) if error is not None
                     and not isinstance(error, int)]  # fmt: skip
            assert cache.closed is not None
            assert loop.time() - struck <= TIMEOUT + 0.1
    except RankFailure as error:
        told.append(error)
    assert all(isinstance(error, RankFailure) for error in told), told
    return [error for error in told if isinstance(error, RankFailure)], struck


async def until_closed(world: GroupWorld) -> None:
    """Serve texts until the cache is closed. Each second text continues the first one, so it finds a state and has it
    copied. The other requests may find none: a hit that needs a fourth state is given up while another request holds
    three of six."""
    while world.cache.closed is None:
        await world.serve(text(2, seed=5))
        await world.serve(text(2, seed=5, extra=1))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("own", [0, None])
@simulated
async def test_a_worker_that_does_not_come_is_named_and_nothing_is_open(loop: SimulatedLoop, own: int | None) -> None:
    world = GroupWorld(loop, Topology(tp=3), settings(16, 40), own=own, arrival=7.0)
    world.begin(absent=frozenset({2}))
    with pytest.raises(RankFailure, match=r"rank 2: did not come within 7 s"):
        async with world.cache:
            pass
    world.group.workers.close()
    await world.group.ended()


@simulated
async def test_what_cannot_be_opened_on_one_worker_is_told_by_rank_and_open_nowhere(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=3), settings(16, 40, stored=True))
    world.begin()
    async def locked(*_: object, **__: object) -> None:
        raise Unavailable("the folder is locked")

    world.process(2).server.open = locked  # type: ignore[method-assign, assignment]
    with pytest.raises(Unavailable, match="rank 2: the folder is locked"):
        async with world.cache:
            pass
    await world.group.ended()
    assert isinstance(world.process(1).failure, RankFailure)
    assert "rank 2: the folder is locked" in str(world.process(1).failure)
    for rank in (0, 1):
        assert world.devices[rank]._streams, "it had been opened"
        assert world.backends[rank].holding == 0


def no_room(world: GroupWorld, rank: int, patch: pytest.MonkeyPatch) -> str:
    def refuse(device: Mapping[str, int], host: Mapping[str, int]) -> None:
        check_room((*device.items(), *host.items()), 100)

    patch.setattr(world.devices[rank], "check_room", refuse)
    return r"rank 2: pool 'full' on the device: .* do not fit in memory"


def no_pinning(world: GroupWorld, rank: int, patch: pytest.MonkeyPatch) -> str:
    """The first pool of the host can be pinned, and the second one cannot."""
    plain, made = world.devices[rank].host_tensor, list[tuple[int, ...]]()

    def host_tensor(shape: tuple[int, ...]) -> torch.Tensor:
        made.append(shape)
        if len(made) > 1:
            raise RuntimeError("cudaHostRegister: out of memory")
        return plain(shape)

    patch.setattr(world.devices[rank], "host_tensor", host_tensor)
    return r"rank 2: pool 'swa': its memory cannot be had: cudaHostRegister: out of memory"


@pytest.mark.parametrize("fate", [no_room, no_pinning])
@pytest.mark.parametrize("own", [0, None])
@simulated
async def test_pools_that_one_worker_has_no_memory_for_are_told_by_rank_and_a_new_group_can_be_opened(
    loop: SimulatedLoop, own: int | None, fate: Callable[[GroupWorld, int, pytest.MonkeyPatch], str]
) -> None:
    world = GroupWorld(loop, Topology(tp=3), settings(16, 40, swa=8, stored=True), own=own)
    made, released = streams_of(world)
    world.begin()
    before = asyncio.all_tasks() - {process.task for process in world.group.processes.values()}
    with pytest.MonkeyPatch.context() as patch:
        reason = fate(world, 2, patch)
        with pytest.raises(ConfigError, match=reason):
            async with world.cache:
                pass
        await world.group.ended()
    for process in world.group.processes.values():
        assert isinstance(process.failure, RankFailure)
        assert re.search(reason, str(process.failure))
    assert made == released != Counter()
    assert asyncio.all_tasks() <= before
    async with world.opened():
        await world.serve(text(6))
        await world.serve(text(6))
        world.idle()
    assert made == released


def streams_of(world: GroupWorld) -> tuple[Counter[str], Counter[str]]:
    """The streams that the devices of all ranks make from now on, and those that they get back."""
    made, released = Counter[str](), Counter[str]()

    def watch(rank: int, device: RankDevice) -> None:
        stream = device.stream

        def make(name: str) -> SimulatedStream:
            made[f"{name} of rank {rank}"] += 1
            return stream(name)

        def release(own: SimulatedStream) -> None:
            released[f"{own.name} of rank {rank}"] += 1

        device.stream, device.release = make, release  # type: ignore[assignment, method-assign]

    for rank, device in world.devices.items():
        watch(rank, device)
    return made, released


@pytest.mark.parametrize("own", [0, None])
@pytest.mark.parametrize("victim", [0, 1])
@simulated
async def test_a_store_that_is_full_on_one_worker_fails_what_is_written_and_no_request(
    loop: SimulatedLoop, own: int | None, victim: int
) -> None:
    """When there is room again, what comes then is stored on all workers, and found by the next group."""
    config = settings(16, 16, stored=True, backup_quota=1.0)
    world = GroupWorld(loop, Topology(tp=2), config, own=own, timeout=TIMEOUT)

    async def put(*_: object) -> list[Result]:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with world.opened() as cache:
        backend = world.backends[victim]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "put", put)
            for seed in range(8):
                await world.serve(text(6, seed=seed))
            await cache.flush()
            stage = cache.statistics().stages["backup_storage"]
            assert stage.errors >= 8
            assert stage.ops == 0
            assert not backend.pages
            handle = cache.prefetch(text(6, extra=1))
            assert await world.serve(text(6, extra=1), prefetch=handle) == 0, "the other worker's pages are no hit"
        await asyncio.sleep(120.0)  # for as long as the breaker of a store keeps calls away at most
        for _ in range(2):
            await world.serve(text(6, seed=20))
            await cache.flush()
        world.idle()
    async with world.opened() as cache:
        handle = cache.prefetch(text(6, seed=20, extra=1))
        assert await world.serve(text(6, seed=20, extra=1), prefetch=handle) == 24


@simulated
async def test_a_configuration_with_other_slots_is_refused_by_name(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
    world.begin()
    world.process(1).server._shard = lambda _: settings(8, 40)
    with pytest.raises(ConfigError, match="rank 1: shard: pool 'full': device_pages is 8 here and 16 at the head"):
        async with world.cache:
            pass
    await world.group.ended()


@simulated
async def test_an_opening_that_is_cancelled_leaves_nothing_anywhere(loop: SimulatedLoop) -> None:
    for turns in range(0, 40, 3):
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True))
        world.begin()
        opening = loop.create_task(world.cache.__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():
            await world.cache.aclose()
        world.group.workers.close()
        await world.group.ended()
        await world.aclose()


@pytest.mark.parametrize("stored", [False, True])
@simulated
async def test_a_worker_that_is_stopped_while_the_cache_closes_delays_it_no_longer_than_its_deadline(
    loop: SimulatedLoop, stored: bool
) -> None:
    """Its link would not notice before the time-out, which may be much longer."""
    world = GroupWorld(loop, Topology(tp=3), settings(16, 40, stored=stored), timeout=300.0)
    world.begin()
    cache = await world.cache.__aenter__()
    world.run()
    await world.serve(text(6))
    world.process(VICTIM).link.fall_silent()
    begun = loop.time()
    try:
        said = str((await cache.aclose(timeout=5.0)).error)
    except BackendError as error:  # all was saved by then
        said = str(error)
    assert "rank 1: had not answered when the cache was to be closed" in said
    assert loop.time() - begun <= 5.0 + 2 * LATE + 1.0
    world.process(VICTIM).task.cancel()
    await asyncio.wait([process.task for process in world.group.processes.values()])
    await asyncio.wait(world.running.values())


# A worker that reports something impossible ends the group as soon as it reports it, and not only when the report is
# used.


OPENED, WROTE, COUNTED = "opened other pools", "wrote a batch of other operations", "counted what nobody can"


@pytest.mark.parametrize(
    ("call", "lie", "why"),
    [
        ("open", {"layers": -1}, OPENED), ("open", {"weights": {"nobody's": 4}}, OPENED),
        ("open", {"weights": {"full": 0}}, OPENED), ("open", {"digest": b"short"}, OPENED),
        ("store", {"failed": frozenset({8})}, WROTE), ("store", {"pages": -1}, WROTE),
        ("store", StoreCounters({"breaker": 99}, {}), COUNTED),
        ("store", StoreCounters({}, {"sim": {"puts": float("nan")}}), COUNTED),
    ],
    ids=["layers that are fewer than none", "a pool that nobody named", "a page without bytes", "no digest",
         "an operation of another batch", "fewer pages than none", "a breaker's state", "no number"],
)  # fmt: skip
@simulated
async def test_what_cannot_be_ends_the_group_by_the_rank_that_says_it(
    loop: SimulatedLoop, call: str, lie: Any, why: str
) -> None:
    """``lie``: what rank 1 says besides, or what of its answer is changed."""
    world = GroupWorld(loop, Topology(tp=2), settings(8, 16, stored=True))
    world.begin()
    server: Any = world.process(1).server
    plain = server._tell

    def tell(message: Any) -> None:
        if type(message) is ORDERS[call].answer:
            if isinstance(lie, StoreCounters):
                plain(lie)
            else:
                message.value = message.value._replace(**lie)
        plain(message)

    async def use() -> None:
        async with world.cache as cache:
            group: Any = cache._opened().worker
            await group.store([WriteOrder(7, (StoredPages(0, bytes(32), bytes(4)),))])
            await world.process(1).ended()
            cache.statistics()

    server._tell = tell
    with pytest.raises(RankFailure, match=f"rank 1.*{why}"):
        await use()
    await world.group.ended()


# An error in the handling of a message ends the group by the rank that had it; a device is used whatever its truth.


def broken(*_: object, **__: object) -> None:
    raise ValueError("no such thing")


async def said_nothing(world: GroupWorld) -> None:
    """The head cannot take what rank 1 says of its stores."""
    async with world.cache:
        world.run()
        group: Any = world.cache._opened().worker
        group._shut = None  # what it notes there, it cannot
        world.process(1).server._tell(StoreHealth(True))
        await asyncio.sleep(0.1)
        assert group.failure is not None
        assert group.failure.rank == 1
        await world.serve(text(2))


async def told_nothing(world: GroupWorld) -> None:
    """Rank 1 cannot take what the head says of a store that is opened."""
    async with world.cache as cache:
        world.run()
        world.process(1).server.be_patient = broken  # type: ignore[method-assign]
        await cache.attach_storage(GUEST)


@pytest.mark.parametrize("own", [0, None])
@pytest.mark.parametrize(
    ("work", "reason"), [(said_nothing, "sent what raised AttributeError here: 'NoneType'"),
                         (told_nothing, "ValueError: no such thing")],
)  # fmt: skip
@simulated
async def test_an_error_while_a_message_is_taken_ends_the_group_by_the_rank_that_it_came_from_or_went_to(
    loop: SimulatedLoop, work: Callable[[GroupWorld], Coroutine[Any, Any, None]], reason: str, own: int | None
) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(8, 16), own=own)
    world.begin()
    with pytest.raises(RankFailure, match=f"rank 1: {reason}"):
        await work(world)
    await ended(world)


async def ended(world: GroupWorld) -> None:
    await asyncio.wait([process.task for process in world.group.processes.values()])
    await asyncio.wait(world.running.values())
    await world.aclose()


class Falsy(CpuDevice):
    """A device without streams is False, as a container without items is."""

    def __bool__(self) -> bool:
        return False


async def test_a_device_whose_truth_is_false_is_used_and_not_closed() -> None:
    device = Falsy()
    async with AsyncCache(runtime_kit.settings(device=8, host=8), device=device) as cache:
        assert device._streams
        await runtime_kit.serve(cache, runtime_kit.text(2))
    device.stream("it is still open")
    await device.aclose()


# A batch that one rank could not run: what it was to compute leaves the cache of all ranks as soon as the head hears
# of it, and its pages come back when all have let go.


End = Callable[[EngineBatch, SimulatedDevice], object]


def by_word(batch: EngineBatch, device: SimulatedDevice) -> None:
    batch.fail("out of memory")


def by_event(batch: EngineBatch, device: SimulatedDevice) -> None:
    gate = device.gate()
    batch.end(gate)
    asyncio.get_running_loop().call_later(0.01, gate.fire, RuntimeError("out of memory"))


def by_an_event_that_has_fired(batch: EngineBatch, device: SimulatedDevice) -> None:
    gate = device.gate()
    gate.fire(RuntimeError("out of memory"))
    batch.end(gate)


def faces(world: GroupWorld) -> list[RankWorker]:
    found = [process.face for process in world.group.processes.values()]
    return found if world.cache.worker is None else [world.cache.worker, *found]


@pytest.mark.parametrize("own", [0, None])
@pytest.mark.parametrize("end", [by_word, by_event, by_an_event_that_has_fired])
@simulated
async def test_a_batch_that_fails_on_one_rank_leaves_at_once_and_its_pages_when_all_have_let_go(
    loop: SimulatedLoop, end: End, own: int | None
) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(4, 24, stored=True), own=own)
    async with world.bare() as cache:
        lagging, failing = faces(world)
        tokens = text(4)
        async with cache.lease(tokens) as lease:
            number = cache.send_batch(b"", [lease])
            await lease.commit(tokens, after=number)
            lease.release(after=number)
        batch = await failing.heard(number)
        assert batch is not None
        assert (await cache.match([*tokens, 7])).device == 4 * PAGE
        end(batch, world.devices[failing.rank])
        await asyncio.sleep(0.5)
        assert (await cache.match([*tokens, 7])).host == 0
        with pytest.raises(TimeoutError):
            async with cache.lease(text(4, seed=2), timeout=1.0):
                pass
        await lagging.heard(number)
        lagging.end_batch(number)
        with pytest.raises(BatchFailed, match=f"rank {failing.rank}.*out of memory"):
            await cache.batch_ended(number)
        async with cache.lease(text(4, seed=2), timeout=5.0) as other:
            assert other.pages.size == 4
        await cache.flush()
        assert all(not backend.pages for backend in world.backends.values())
        world.idle()


@simulated
async def test_whoever_has_heard_of_the_failure_finds_nothing_and_holders_learn_of_it(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 24, stored=True))
    async with world.bare() as cache:
        tokens = text(2)
        async with cache.lease(tokens) as lease:
            number = cache.send_batch(b"", [lease])
            await lease.commit(tokens, after=number)
            lease.release(after=number)
        async with cache.lease(text(2, extra=1)) as holder:
            assert holder.cached == 2 * PAGE
            for server in servers(world):
                batch = await faces(world)[server.rank].heard(number)
                assert batch is not None
                batch.fail("no") if server.rank else batch.end()
            with pytest.raises(BatchFailed):
                await cache.batch_ended(number)
            async with cache.lease(text(2, extra=1)) as other:
                assert other.cached == 0
            with pytest.raises(LoadFailed):
                await holder.loaded()
            with pytest.raises(LoadFailed):
                await lease_again(world, number)
        await cache.flush()
        world.idle()


async def lease_again(world: GroupWorld, number: int) -> None:
    """Commit with a batch that is known to have failed."""
    async with world.cache.lease(text(2, seed=3)) as lease:
        await lease.commit(text(2, seed=3), after=number)
