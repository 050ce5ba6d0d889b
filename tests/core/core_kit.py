"""Steps that many tests of the core take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asynccache.core.cache import Grant
from asynccache.core.plan import BackupHost, More
from asynccache.core.settings import CoreConfig
from tests.simulated.fetching import Fetch, open_fetch
from tests.simulated.synchronous import MAMBA, SPACE, Running, SynchronousRuntime, core_config, spell

COMPONENTS = ["full", "full,swa", "full,mamba", "full,swa,mamba"]


def runtime(components: str = "full", **options: Any) -> SynchronousRuntime:
    return SynchronousRuntime(core_config(components, **options))


def resized(config: CoreConfig, kind: int, **slots: int) -> CoreConfig:
    """Other room for one component, on the ``device`` or the ``host``."""
    return replace(config, components=tuple(
        replace(part, **slots) if part.kind == kind else part for part in config.components  # type: ignore[arg-type]
    ))  # fmt: skip


def granted(run: SynchronousRuntime, text: str | bytes, new: int = 0, **options: Any) -> Running:
    """A request that need not wait; ``new``: tokens beside those of ``text``."""
    request = run.lease(spell(text, run.page) if isinstance(text, str) else text, new, **options)
    assert request is not None
    return request


def written(run: SynchronousRuntime, text: str, new: int = 0, **options: Any) -> Running:
    """A request that has computed and committed all of its text, and goes on."""
    request = granted(run, text, new, **options)
    request.compute(len(text) * run.page)
    assert request.commit()
    return request


def take(run: SynchronousRuntime, pages: int, states: int = 0) -> Running:
    """A request that needs so many pages and shares nothing."""
    return granted(run, b"", pages * run.page, states=states)


def leased(run: SynchronousRuntime, text: str, **terms: Any) -> Running:
    """A request that need not wait, on these terms (see ``LeaseRequest``)."""
    ask = run.ask(spell(text))._replace(**terms)
    answer = run.core.lease(ask)
    assert isinstance(answer, Grant), answer
    request = Running(run, answer.lease, SPACE, ask.key)
    run.running.add(request)
    run.perform(answer.plan)
    return request


def take_beside_full(run: SynchronousRuntime, swa: int = 0, states: int = 0) -> None:
    """A request that needs so many SWA pages and states, and nothing else; it stays."""
    leased(run, "", states=states, reserve_swa=swa * run.page)


def clear_device(run: SynchronousRuntime) -> None:
    """Save everything; then a request takes all of the device for a moment."""
    run.flush()
    full = run.config.components[0].device
    take(run, full, sum(part.device for part in run.config.components if part.kind == MAMBA)).release()


def opened(run: SynchronousRuntime, text: str = "abcdefgh", **options: Any) -> Fetch:
    """A prefetch that begins."""
    fetch = open_fetch(run, spell(text), **options)
    assert isinstance(fetch, Fetch), fetch
    return fetch


def reach(run: SynchronousRuntime, *texts: str) -> list[int]:
    """How many pages of each text the device has."""
    return [run.reach(text)[0] for text in texts]


def forget(run: SynchronousRuntime, space: bytes | None) -> None:
    """Invalidate a namespace, or all."""
    while isinstance(answer := run.core.invalidate(space), More):
        run.perform(answer.plan)
    run.perform(answer)


def insert(run: SynchronousRuntime, *texts: str) -> None:
    """Whole requests, one after the other."""
    for text in texts:
        run.insert(text)


def whole(run: SynchronousRuntime, *texts: str, checkpoint: int | None = None) -> None:
    """Whole requests; where there are states, each keeps the one after ``checkpoint`` pages, or at its end."""
    for text in texts:
        end = len(text) if checkpoint is None else checkpoint
        run.insert(text, checkpoint=end if MAMBA in run.kinds else 0)


def copied(run: SynchronousRuntime, *texts: str) -> None:
    """Whole requests, each of which the host has a copy of, which storage is to take."""
    for text in texts:
        run.insert(text)
        run.complete(*run.in_flight(BackupHost))


def saved(run: SynchronousRuntime, *texts: str) -> None:
    """Whole requests, each of which is backed up and stored before the next one."""
    for text in texts:
        run.insert(text)
        run.settle()


def with_store_of(config: CoreConfig, *texts: str, checkpoint: int | None = None) -> SynchronousRuntime:
    """A fresh process whose store has the texts, which one with more room has written, and their states at
    ``checkpoint`` or at their ends."""
    parts = tuple(replace(part, device=256, host=256) for part in config.components)
    writer = SynchronousRuntime(replace(config, components=parts))
    whole(writer, *texts, checkpoint=checkpoint)
    writer.flush()
    return SynchronousRuntime(config, storage=writer.storage)
