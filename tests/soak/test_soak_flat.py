"""The soak tells a run that is flat from one that is not, by its figures and in a real run that leaks."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak import flat
from tests.soak.flat import Look, Soak, differences, look

MIB = 1 << 20


def looks(rss: Callable[[int], float], **more: Callable[[int], int]) -> list[Look]:
    """A look each second for 400 s."""
    counts: dict[str, Callable[[int], int]] = {
        "fds": lambda _: 40, "threads": lambda _: 20, "tasks": lambda i: 50 + i % 7, **more,
    }  # fmt: skip
    return [Look(float(i), int(rss(i) * MIB), **{name: count(i) for name, count in counts.items()}) for i in range(400)]


def test_a_process_that_goes_up_and_down_is_flat() -> None:
    assert list(differences(looks(lambda i: 400 + i % 60))) == []
    assert list(differences(looks(lambda i: 400 + i / 70))) == []


@pytest.mark.parametrize(("found", "said"), [
    (looks(lambda i: 400 + i / 30), "resident memory went from 401.6 MiB to 411.6 MiB, by +2.5%"),
    (looks(lambda i: 400 - i / 30), "resident memory went from"),
    (looks(lambda _: 400, fds=lambda i: 40 + i // 50), "fds went from 40.5 to 46.5"),
    (looks(lambda _: 400, threads=lambda i: 20 + i // 100), "threads went from 20 to 23"),
    (looks(lambda _: 400, tasks=lambda i: 50 + i // 30), "tasks went from 51 to 61"),
    ([], "too few to compare"),
])  # fmt: skip
def test_what_grows_or_shrinks_is_named_with_its_figures(found: list[Look], said: str) -> None:
    (sentence,) = differences(found)
    assert said in sentence


async def test_memory_that_is_a_files_does_not_count(tmp_path: Path) -> None:
    """The kernel took 66 MiB of libraries away once, and gave them back while requests were served."""
    file = tmp_path / "library"
    file.write_bytes(b"x" * (64 * MIB))
    before = look(0.0).rss
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        assert look(1.0).rss - before < 16 * MIB


@pytest.mark.slow(6)
def test_a_run_that_leaks_memory_is_not_flat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sixty-fourth of what it had at the first look, at each look, in a real run: a slow machine has time for few
    looks, and a process that has run other tests is large."""
    kept: list[bytes] = []
    note = Soak._note

    def leaks(self: Soak, found: Look, number: int) -> None:
        note(self, found, number)
        kept.append(b"x" * (len(kept[0]) if kept else found.rss // 64))

    monkeypatch.setattr(Soak, "_note", leaks)
    monkeypatch.setattr(flat, "EVERY", 0.05)
    assert flat.soak(5.0, seed=1) == 1
    assert "resident memory went from" in capsys.readouterr().out
