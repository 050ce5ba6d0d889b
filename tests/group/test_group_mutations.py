"""Each law of a group is broken once, and random worlds notice: so they can fail.

A mutation replaces one function of the real code. ``noticed`` plays worlds in which the law matters until one of them
fails. The seed at which it was noticed when this was written comes first, so that most tests play one world.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import BackupHost, Status
from asynccache.core.settings import ComponentKind
from asynccache.errors import RankFailure
from asynccache.runtime.engine_batches import EngineBatches
from asynccache.storage.contract import Result
from asynccache.worker import folds, watched_keys
from asynccache.worker.group import AwaitedAnswers, WorkerGroup
from asynccache.worker.local import BatchWrite, LocalWorker
from asynccache.worker.messages import BatchOver, Message, WorksOver
from asynccache.worker.rank_server import ORDERS, EngineBatch, RankProcess, RankServer, SentBatches
from asynccache.worker.work import StoredBatch, Work
from tests.group import test_group_calls
from tests.group.random_worlds import draw, play
from tests.simulated.drawn import Climate
from tests.simulated.links import SimulatedLink

pytestmark = pytest.mark.slow(2)

Patch = pytest.MonkeyPatch
MOST = 60


class Mutation(NamedTuple):
    """``breaks``: replaces what keeps the law. ``seed``: a world that notices. ``matters``: in which worlds it can be
    noticed."""

    breaks: Callable[[Patch], None]
    seed: int = 0
    matters: Callable[[Climate], bool] = lambda climate: climate.topology.ranks > 1


def noticed(mutation: Mutation, patch: Patch) -> None:
    """Some world fails."""
    seeds: list[int] = [mutation.seed, *range(2000)]
    for seed in seeds:
        if not mutation.matters(draw(seed)):
            continue
        with patch.context() as broken:
            mutation.breaks(broken)
            if not _goes_well(seed):
                return
        TRIED.append(seed)
        if len(TRIED) > MOST:
            break
    raise AssertionError(f"nobody noticed in {len(TRIED)} worlds")


def _goes_well(seed: int) -> bool:
    """Return whether nothing is noticed in this world. One that breaks leaves coroutines behind that nobody awaits, and
    whose ends want a loop."""
    with warnings.catch_warnings(), Patch.context() as patch:
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(sys, "unraisablehook", lambda unraisable: None)
        try:
            play(seed)
        except (Exception, ExceptionGroup):
            noticed = True
        else:
            noticed = False
        gc.collect()
    return not noticed


TRIED: list[int] = []


# one outcome


def one_done_is_done(patch: Patch) -> None:
    """An operation is DONE, and its slots are free, when the first worker says so."""
    plain = WorkerGroup._ended

    def ended(self: WorkerGroup, rank: int, news: WorksOver) -> None:
        reports, early = self._reports, self.__dict__.setdefault("early", set[int]())
        assert reports is not None
        if news.status is Status.DONE:
            for first in [one for one in news.works if one not in early]:
                early.add(first)
                reports.ended(Status.DONE, self._copies[first].work.ops)
        self._reports = reports._replace(
            ended=lambda status, ops: None if ops[0] in early else reports.ended(status, ops)
        )
        plain(self, rank, news)
        self._reports = reports

    patch.setattr(WorkerGroup, "_ended", ended)


def failures_are_forgotten(patch: Patch) -> None:
    """An operation that failed on one worker is DONE when all have let go."""
    plain = WorkerGroup._ended
    patch.setattr(
        WorkerGroup, "_ended", lambda self, rank, news: plain(self, rank, WorksOver(Status.DONE, news.works))
    )


def one_failure_ends_it(patch: Patch) -> None:
    """An operation is over, and its slots are free, when the first worker fails, though others are still at it."""
    plain = WorkerGroup._ended

    def ended(self: WorkerGroup, rank: int, news: WorksOver) -> None:
        gone: set[int] = self.__dict__.setdefault("gone", set())
        works = [first for first in news.works if first not in gone]
        if news.status is not Status.DONE:
            gone.update(works)
            for first in works:
                self._copies[first].left = {rank}
        plain(self, rank, WorksOver(news.status, works))

    patch.setattr(WorkerGroup, "_ended", ended)


def stored_when_one_has(patch: Patch) -> None:
    """An operation is stored when the first worker has written it."""
    plain = folds.total

    def total(parts: Sequence[StoredBatch], **named: Any) -> StoredBatch:
        failed = frozenset.intersection(*(frozenset(part.failed) for part in parts))
        return plain(parts, **named)._replace(failed=failed)

    patch.setattr(folds, "total", total)


def failed_copies_are_forgotten(patch: Patch) -> None:
    """A worker does not remember which loads have failed on it."""
    patch.setattr(RankServer, "_ended", lambda self, status, ops: self._tell(WorksOver(status, [ops[0]])))


def outcomes_of_another_number(patch: Patch) -> None:
    """What a worker says of an operation that it ended a moment ago is taken for the next one's."""
    plain = RankServer._ended
    last: dict[int, int] = {}

    def ended(self: RankServer, status: Status, ops: Sequence[int]) -> None:
        before, last[id(self)] = last.get(id(self)), ops[0]
        plain(self, status, ops)
        if before is not None and before != ops[0] and self._loop.time() % 1 < 0.2:
            self._tell(WorksOver(status, [before]))

    patch.setattr(RankServer, "_ended", ended)


# the fold of answers


def any_has_it(patch: Patch) -> None:
    """A page is there if one worker has it."""

    def best(answers: Sequence[bytes]) -> bytes:
        shortest = min(map(len, answers))
        return bytes(
            Result.HIT if any(answer[i] == Result.HIT for answer in answers) else answers[0][i] for i in range(shortest)
        )

    patch.setattr(folds, "worst", best)


def one_is_asked(patch: Patch) -> None:
    """What the first worker says of pages stands for all."""
    patch.setattr(folds, "worst", lambda answers: answers[0])


# order


def sent_after_an_await(patch: Patch) -> None:
    """Effects go to the links some turns after the core's call."""
    plain = WorkerGroup.perform
    random = Random(1)

    def perform(self: WorkerGroup, plan: Sequence[Work]) -> None:
        asyncio.get_running_loop().call_later(random.random() * 0.002, plain, self, plan)

    patch.setattr(WorkerGroup, "perform", perform)


def frames_overtake(patch: Patch) -> None:
    """A frame may come before one that was sent earlier."""
    plain = SimulatedLink._arrive
    random = Random(1)

    def arrive(self: SimulatedLink) -> None:
        self._under_way.rotate(random.randrange(len(self._under_way) or 1))
        plain(self)

    patch.setattr(SimulatedLink, "_arrive", arrive)


# the engine's batches


def over_on_one(patch: Patch) -> None:
    """A batch is over when the first worker says so."""

    counts: dict[int, int] = {}
    plain = AwaitedAnswers.__init__

    def begin(self: AwaitedAnswers, number: int, ranks: Collection[int], *, failed: bool = False) -> None:
        plain(self, number, ranks, failed=failed)
        counts[id(self)] = len(ranks)

    def is_over(self: AwaitedAnswers) -> bool:
        return not self.left or len(self.left) < counts[id(self)]

    patch.setattr(AwaitedAnswers, "__init__", begin)
    patch.setattr(AwaitedAnswers, "done", is_over)
    plain_over = WorkerGroup._over

    def over(self: WorkerGroup, rank: int, news: BatchOver) -> None:
        kept = self._sent.get(news.number)
        if kept is not None and len(kept.left) > 1:
            kept.left.discard(rank)
        else:
            plain_over(self, rank, news)

    patch.setattr(WorkerGroup, "_over", over)


def failed_batches_count_as_run(patch: Patch) -> None:
    """What a rank says of a batch that it could not run is heard, and has no consequence for its pages."""
    patch.setattr(AwaitedAnswers, "failed", property(lambda self: False, lambda self, failed: None))


def copies_wait_for_no_batch(patch: Patch) -> None:
    """A worker copies at once, whatever the head has listed."""
    patch.setattr(RankServer, "_must_wait", lambda self, order: False)
    patch.setattr(SentBatches, "events", lambda self, numbers: [])


def a_batch_without_an_event_is_over(patch: Patch) -> None:
    """A worker does not wait for the events of batches that its engine has not ended yet."""
    patch.setattr(SentBatches, "lacks_event", lambda self, numbers: False)


def backups_name_no_batch(patch: Patch) -> None:
    """The head lists no batch for what a commit has published."""
    plain = EngineBatches._before
    patch.setattr(EngineBatches, "_before", lambda self, e: () if isinstance(e, BackupHost) else plain(self, e))


def a_models_error_is_the_end(patch: Patch) -> None:
    """A batch that the engine of one rank cannot run is the end of its worker."""
    plain = RankServer.end_batch

    def end_batch(self: RankServer, batch: EngineBatch, event: object | None, error: str) -> None:
        plain(self, batch, event, error)
        if error:
            self.die(RankFailure(error, self.rank))

    patch.setattr(RankServer, "end_batch", end_batch)


# stores that come and go


def _told_late(patch: Patch, method: str) -> None:
    plain = WorkerGroup._put

    def put(self: WorkerGroup, message: Message) -> None:
        if type(message) is ORDERS[method].message:
            asyncio.get_running_loop().call_later(0.02, plain, self, message)
        else:
            plain(self, message)

    patch.setattr(WorkerGroup, "_put", put)


def stores_are_used_late(patch: Patch) -> None:
    """What the head decides on a new store overtakes that the store is to be used."""
    _told_late(patch, "use_store")


def stores_are_left_late(patch: Patch) -> None:
    """What the head decides without a store overtakes that the store was detached."""
    _told_late(patch, "leave_store")


def gone_when_all_have_lost_it(patch: Patch) -> None:
    """A watched page is in a store as long as one writer has it."""
    patch.setattr(watched_keys, "all", any, raising=False)


# which replica writes


def one_replica_writes_everywhere(patch: Patch) -> None:
    """Of pages that ranks hold alike the first writes, also where each has a store of its own."""

    async def put(self: Any, part: Sequence[Any]) -> None:
        ours = [page for page in part if page.ours]
        for page in part:
            if not page.ours:
                self.left[page.op] -= 1
        if ours:
            await self._put_in(ours, shared=True)

    patch.setattr(BatchWrite, "put", put)


def every_replica_writes(patch: Patch) -> None:
    """All write pages that they hold alike, to the store that they share, too."""

    async def put(self: Any, part: Sequence[Any]) -> None:
        await self._put_in(part, shared=True)

    patch.setattr(BatchWrite, "put", put)


def a_backup_to_storage_loses_its_last_page(patch: Patch) -> None:
    """Not all that the head names is written."""
    plain = BatchWrite._put_in

    async def put_in(self: Any, part: Sequence[Any], *, shared: bool) -> None:
        last = part[-1]
        self.left[last.op] -= 1
        fewer = last._replace(keys=last.keys[:-1], payloads=last.payloads[:-1])
        if some := [*part[:-1], *([fewer] if fewer.keys else ())]:
            await plain(self, some, shared=shared)

    patch.setattr(BatchWrite, "_put_in", put_in)


# prefetches


def windows_need_not_be_whole(patch: Patch) -> None:
    """What came of a window is taken, also where a page of it did not."""
    plain = WorkerGroup.read

    async def read(self: WorkerGroup, reads: Sequence[Any], *, run: bool) -> list[bytes]:
        answers = await plain(self, reads, run=run)
        return answers if run else [bytes([Result.HIT]) * len(answer) for answer in answers]

    patch.setattr(WorkerGroup, "read", read)


def pools_are_not_aligned(patch: Patch) -> None:
    """What follows FULL is taken for read as far as FULL was."""
    plain = WorkerGroup.read

    async def read(self: WorkerGroup, reads: Sequence[Any], *, run: bool) -> list[bytes]:
        answers = await plain(self, reads, run=run)
        return [answers[0]] + [bytes([Result.HIT]) * len(answers[0]) for _ in answers[1:]] if run else answers

    patch.setattr(WorkerGroup, "read", read)


def who_has_no_bytes_has_no_page(patch: Patch) -> None:
    """A worker without bytes of a pool says that the pool's pages are missing."""
    plain = LocalWorker._results

    async def results(self: LocalWorker, pool: str, hashes: bytes, slots: bytes | None = None) -> bytes:
        if not self._map.has(pool):
            return bytes([Result.MISS]) * (len(hashes) // HASH_BYTES)
        return await plain(self, pool, hashes, slots)

    patch.setattr(LocalWorker, "_results", results)


# the end


def nobody_is_told(patch: Patch) -> None:
    """Who waits for an answer is not told that the group has failed."""

    def fail(self: WorkerGroup, failure: Any) -> None:
        if self.failure is None:
            self._say_lost(failure.rank, failure.reason)
            self.failure = failure

    patch.setattr(WorkerGroup, "_fail", fail)


def the_others_are_not_told(patch: Patch) -> None:
    """The other workers do not hear who has failed, and why."""
    plain = WorkerGroup._fail

    def fail(self: WorkerGroup, failure: Any) -> None:
        links, self._wire.links = self._wire.links, []
        plain(self, failure)
        self._wire.links = links

    patch.setattr(WorkerGroup, "_fail", fail)


def the_head_is_not_missed(patch: Patch) -> None:
    """A worker goes on when its link to the head has ended."""
    patch.setattr(RankProcess, "_lost", lambda self, failure: None)


def has_fate(climate: Climate) -> bool:
    return bool(climate.fate) and climate.topology.ranks > 2


def replicated_in(climate: Climate, *, shared: bool) -> bool:
    alike = any(spec.replicated for spec in climate.config.pools())
    return alike and climate.topology.tp > 1 and climate.shared is shared and bool(climate.config.stores)


def stored(climate: Climate) -> bool:
    return climate.topology.ranks > 1 and bool(climate.config.stores)


def loses(climate: Climate) -> bool:
    """Pages may be lost between the question and the reading."""
    losing = ("failed", "wrong", "short", "empty", "vanished")
    return stored(climate) and any(getattr(h, name) for h in climate.hostility.values() for name in losing)


def windows_break(climate: Climate) -> bool:
    return loses(climate) and any(spec.component == ComponentKind.SWA for spec in climate.config.pools())


def ends_differ(climate: Climate) -> bool:
    """Two pools follow FULL."""
    followers = [spec for spec in climate.config.pools() if spec.indices_from and spec.component == ComponentKind.FULL]
    return loses(climate) and len(followers) > 1


def stores_come_and_go(climate: Climate) -> bool:
    return climate.topology.ranks > 1 and climate.disturb > 0 and climate.config.pools()[0].host_pages > 0


def loads_fail(climate: Climate) -> bool:
    return climate.pressure > 0 and any(faults.failing for faults in climate.loads.values())


MUTATIONS = {
    "done when one is": Mutation(one_done_is_done, 13),
    "failed on one is done": Mutation(failures_are_forgotten, 1),
    "free before all have let go": Mutation(one_failure_ends_it, 1),
    "stored when one has": Mutation(stored_when_one_has, 17, matters=stored),
    "failed copies are forgotten": Mutation(failed_copies_are_forgotten, 58, matters=loads_fail),
    "an outcome of another number": Mutation(outcomes_of_another_number, 1),
    "any worker's page is a hit": Mutation(any_has_it, 4, matters=stored),
    "one replica is asked": Mutation(one_is_asked, 4, matters=stored),
    "sent after an await": Mutation(sent_after_an_await),
    "frames overtake": Mutation(frames_overtake, 1),
    "over on one": Mutation(over_on_one, 26),
    "failed batches count as run": Mutation(
        failed_batches_count_as_run, 59, matters=lambda c: c.unable > 0 and stored(c)
    ),
    "copies wait for no batch": Mutation(copies_wait_for_no_batch, 2),
    "no event is over": Mutation(a_batch_without_an_event_is_over, 10),
    "backups name no batch": Mutation(backups_name_no_batch, 11),
    "a model's error is the end": Mutation(a_models_error_is_the_end, 0, matters=lambda c: c.unable > 0),
    "stores are used late": Mutation(stores_are_used_late, 107, matters=stores_come_and_go),
    "stores are left late": Mutation(stores_are_left_late, 209, matters=stores_come_and_go),
    "one replica writes to own stores": Mutation(
        one_replica_writes_everywhere, 63, matters=lambda c: c.calm and replicated_in(c, shared=False)
    ),
    "every replica writes to a shared store": Mutation(
        every_replica_writes, 3, matters=lambda c: replicated_in(c, shared=True)
    ),
    "a page is not written": Mutation(
        a_backup_to_storage_loses_its_last_page, 11, matters=lambda c: c.calm and stored(c)
    ),
    "windows need not be whole": Mutation(windows_need_not_be_whole, 2121, matters=windows_break),
    "pools are not aligned": Mutation(pools_are_not_aligned, 566, matters=ends_differ),
    "the head is not missed": Mutation(the_head_is_not_missed, 2, matters=has_fate),
    "nobody is told of the end": Mutation(nobody_is_told, 2, matters=has_fate),
    "the others are not told": Mutation(the_others_are_not_told, 2, matters=has_fate),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_law_that_is_broken_is_noticed(name: str, monkeypatch: Patch) -> None:
    TRIED.clear()
    noticed(MUTATIONS[name], monkeypatch)


# laws that the random worlds do not need: they hear no events, and have no pool without bytes on one rank only


def test_a_page_that_is_gone_when_all_writers_have_lost_it_is_noticed(monkeypatch: Patch) -> None:
    gone_when_all_have_lost_it(monkeypatch)
    with pytest.raises(AssertionError, match="rank 1 has lost its part"):
        test_group_calls.test_events_tell_of_a_page_in_storage_when_all_have_it_until_one_has_lost_it(shared=False)
    gc.collect()


def test_a_worker_without_bytes_that_lacks_all_pages_is_noticed(monkeypatch: Patch) -> None:
    who_has_no_bytes_has_no_page(monkeypatch)
    with pytest.raises(AssertionError, match="found"):
        test_group_calls.test_a_page_that_has_no_bytes_on_one_worker_is_found_where_the_others_have_it(
            False, monkeypatch
        )
    gc.collect()
