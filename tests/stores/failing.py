"""A cache whose store fails, and the courses: what is done to each kind of store meanwhile. As a program, every course,
and what it measured, as JSON.

    python -m tests.stores.failing [--json FILE] [STORE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

from tests import warm
from tests.stores.mooncake_server import MooncakeMaster
from tests.stores.object_server import CephServer, MotoServer
from tests.stores.redis_server import RedisCluster, RedisServer
from tests.stores.server import HOST, ROOT, ours
from tests.stores.slow_proxy import DISKS, QUOTA, FullProxy, SlowProxy

# A cache whose store fails: the stress tool runs with verification, while trouble comes and goes.
#
# A *course* is one run: it warms up until storage gives hits, then, trouble after trouble, the store is hurt, healed,
# and hits have to come back by themselves. Nothing may go wrong in all that time: no request fails, no byte is wrong,
# nothing leaks. The run without L3 beside it, under the same load, says what requests may take.
# The courses stand at the end.


LOAD = (
    "--workload", "mixed", "--rate", "25", "--concurrency", "16", "--components", "full,swa,mamba",
    "--end-hints", "0.5", "--window", "256",
    "--bytes-per-token", "128", "--layers", "2", "--mamba-bytes", "4096", "--device-tokens", "12288",
    "--host-tokens", "8192", "--prefill-tokens-per-s", "20000", "--decode-tokens", "32", "--duration", "600",
)  # fmt: skip
START_WITHIN = 60.0
HITS_WITHIN = 60.0
SEEN_WITHIN = 40.0
END_WITHIN = 90.0
LONGEST = 20.0                                         # what the prefetch policy allows, on a machine ten times slower
ALONE_SECONDS = 12.0

Standing = dict[str, Any]


class Trouble(NamedTuple):
    """One trouble. ``hurt`` begins and ``heal`` ends it at the store; between them ``seconds`` pass, or more.
    ``opens``: the breaker has to open; ``gives``: pages have to come from it all the same; ``lies``: some of them have
    to be wrong."""

    name: str
    hurt: Callable[[], object]
    heal: Callable[[], object]
    seconds: float = 8.0
    opens: bool = True
    gives: bool = False
    lies: bool = False


@dataclass
class Phase:
    """One trouble as it was seen. ``first``, ``last``: requests by their number. ``given``: pages from storage
    meanwhile. ``back``: seconds from ``heal`` to the first hit."""

    name: str
    first: int
    last: int = 0
    back: float = 0.0
    opened: int = 0
    given: int = 0


@dataclass
class Seen:
    """The results of a course."""

    store: str
    report: dict[str, Any]
    phases: list[Phase] = field(default_factory=list)

    def waits(self, phase: Phase, *, opened: bool = False) -> list[float]:
        """Seconds to the first token of the requests of ``phase``; ``opened``: of those that came when the breaker was
        open, be it for a moment."""
        which = range(phase.first, phase.last)
        asked, changes = self.report["asked"], self.report["changes"]
        return [self.report["first_token"][i] for i in which if not opened or bisect(changes, asked[i]) % 2]

    def p99(self, phase: Phase) -> float:
        """The 99th percentile of ``waits``, of all requests of ``phase``."""
        return quantile(self.waits(phase), 0.99)


class Run:
    """The stress tool on one store, in a process of its own."""

    def __init__(self, storage: str, *more: str, environment: Mapping[str, str] | None = None) -> None:
        words = [*LOAD, "--storage", storage, *more]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the run; a store's client may say a lot
        self.process = warm.Popen(
            [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.stores.failing_child", *words], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1,
            start_new_session=True, env=ours(environment),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.log.close()

    def said(self) -> str:
        """The end of its standard error."""
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 2000))
        return self.log.read().decode(errors="replace")

    def look(self) -> Standing:
        """Its counters now."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the run ended by itself, with status {self.process.wait()}: {self.said()}"
        found: Standing = json.loads(line)
        return found

    def until(self, condition: Callable[[Standing], bool], within: float, what: str) -> Standing:
        """Its counters as soon as ``condition`` holds."""
        end = time.monotonic() + within
        while not condition(standing := self.look()):
            assert time.monotonic() < end, f"not within {within:.0f} s: {what}; {standing}"
            time.sleep(0.1)
        return standing

    def began(self) -> None:
        """Return when it serves requests."""
        self.until(lambda standing: standing["served"] > 0, START_WITHIN, "the run serves requests")

    def hits(self) -> Standing:
        """Return when storage has given pages since now."""
        before = self.look()["get_pages"]
        return self.until(lambda now: now["get_pages"] > before, HITS_WITHIN, "hits from storage")

    def finish(self) -> dict[str, Any]:
        """End it with Ctrl-C; returns its report."""
        os.kill(self.process.pid, signal.SIGINT)
        try:
            out, _ = self.process.communicate(timeout=END_WITHIN)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {END_WITHIN:.0f} s of Ctrl-C") from None
        lines = out.splitlines()
        assert lines, f"no report; the run ended with status {self.process.returncode}: {self.said()}"
        report: dict[str, Any] = json.loads(lines[-1])
        return report


def suffer(
    storage: str, troubles: Sequence[Trouble], *, name: str, words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Seen:  # fmt: skip
    """Run one course; ``words`` are more options of ``stress``. Raises AssertionError where hits do not come back, and
    ``check`` where anything else was wrong."""
    with Run(storage, *words, environment=environment) as run:
        run.began()
        run.hits()
        phases = [_endure(run, trouble) for trouble in troubles]
        return Seen(name, run.finish(), phases)


def _endure(run: Run, trouble: Trouble) -> Phase:
    before = run.look()
    phase = Phase(trouble.name, before["timed"])
    trouble.hurt()
    end = time.monotonic() + trouble.seconds
    standing = before
    while time.monotonic() < end or (time.monotonic() < end + SEEN_WITHIN and not _seen(trouble, before, standing)):
        time.sleep(0.1)
        standing = run.look()
    phase.last, phase.opened = standing["timed"], standing["breaker_opened"] - before["breaker_opened"]
    phase.given = standing["get_pages"] - before["get_pages"]
    trouble.heal()
    healed = time.monotonic()
    run.hits()
    phase.back = time.monotonic() - healed
    return phase


def _seen(trouble: Trouble, before: Standing, now: Standing) -> bool:
    """Whether all has come about that is asked of a trouble; on a busy machine that may take longer."""
    opened, given = now["breaker_opened"] > before["breaker_opened"], now["get_pages"] > before["get_pages"]
    lied = now["corrupt_pages"] > before["corrupt_pages"]
    return now["timed"] > before["timed"] and all((opened or not trouble.opens, given or not trouble.gives,
                                                   lied or not trouble.lies))  # fmt: skip


def alone(seconds: float = ALONE_SECONDS) -> dict[str, Any]:
    """The report of a run without L3, under the same load."""
    with Run("none") as run:
        run.began()
        time.sleep(seconds)
        return run.finish()


def check(seen: Seen, troubles: Sequence[Trouble]) -> None:
    """Raises AssertionError unless all went well: nothing wrong, nothing left, nobody failed, nobody waited long."""
    report = seen.report
    assert report["verify"]["mismatches"] == 0, report["problems"]
    assert report["verify"]["pages"] > 0
    assert report["leaks"] == {"device_pages": 0, "host_pages": 0, "pins": 0, "tasks": 0}, report["leaks"]
    assert report["failed"] == 0, report["problems"]
    assert report["requests"] == report["served"] + report["cancelled"]
    assert report["fetched_while_open"] == 0, "a request that came when the breaker was open asked storage"
    for phase, trouble in zip(seen.phases, troubles, strict=True):
        assert phase.last > phase.first, f"no request was served while it was {phase.name}"
        assert phase.opened or not trouble.opens, f"the breaker did not open while it was {phase.name}"
        assert phase.given or not trouble.gives, f"nothing came from storage while it was {phase.name}"
        assert seen.p99(phase) < LONGEST, f"requests waited while it was {phase.name}"


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of ``values``, which need not be in order."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def figures(seen: Seen, without: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a course, and those of the run without L3."""
    base = quantile(without["first_token"], 0.99)
    phases = {}
    for phase in seen.phases:
        waits = seen.waits(phase, opened=True)
        whole, opened = seen.p99(phase), quantile(waits, 0.99) if waits else None
        phases[phase.name] = {
            "requests": phase.last - phase.first,
            "p99_ms": round(whole * 1e3, 1),
            "p99_open_ms": None if opened is None else round(opened * 1e3, 1),
            "times_without_l3": round(whole / base, 2),
            "times_without_l3_open": None if opened is None else round(opened / base, 2),
            "hits_back_after_s": round(phase.back, 1),
            "breaker_opened": phase.opened, "pages_given": phase.given,
        }
    return {"store": seen.store, "p99_without_l3_ms": round(base * 1e3, 1), "requests": seen.report["requests"],
            "verified_pages": seen.report["verify"]["pages"], "mismatches": seen.report["verify"]["mismatches"],
            "phases": phases}  # fmt: skip


# The courses: what is done to each kind of store while the stress tool runs. Each returns what was seen, after it was
# checked. A server is made for its course: what is done to it is felt by every client.


class Course(NamedTuple):
    """``server``: what is made for it, and closed then. ``seconds``: of a test of it; 0: it is for soaks."""

    store: str
    server: Callable[[], Any]
    troubles: Callable[[Any], Seen]
    seconds: int = 0


def run(name: str) -> Seen:
    """Run the course of this name. Raises AssertionError where anything was wrong."""
    course = COURSES[name]
    with course.server() as server:
        return course.troubles(server)


def _course(name: str, url: str, options: str, *troubles: Trouble, **more: Any) -> Seen:
    seen = suffer(f"{url}{'&' if '?' in url else '?'}{options}", troubles, name=name, **more)
    check(seen, troubles)
    return seen


def _hung_and_killed(name: str, server: Any, *more: Trouble, options: str = "timeout=2&slow=0.5") -> Seen:
    """Hung; killed, and back with nothing."""
    return _course(name, server.url, options, Trouble("hung", server.hang, server.resume),
                   Trouble("killed", server.kill, server.restart), *more)  # fmt: skip


def _full_and_slow(name: str, url: str, servers: Any, proxies: Sequence[SlowProxy]) -> Seen:
    """Full: it takes nothing more, and gives what it has. Slow: all of its answers are late, and they are used."""

    def limit(size: str) -> None:
        servers.say("CONFIG", "SET", "maxmemory", size)

    def late(seconds: float) -> None:
        for proxy in proxies:
            proxy.late(seconds)

    return _course(
        name, url + ",".join(f"{HOST}:{proxy.port}" for proxy in proxies), "timeout=2&slow=0.5",
        _full("full", lambda: limit("1mb"), lambda: limit("0")),
        Trouble("slow", lambda: late(0.8), lambda: late(0.0)),
    )  # fmt: skip


def _redis(server: Any) -> Seen:
    emptied = Trouble("emptied", server.restart, lambda: None, seconds=3.0, opens=False)
    return _hung_and_killed("redis", server, emptied)


def _redis_full(server: Any) -> Seen:
    with SlowProxy(server.port) as proxy:
        return _full_and_slow("redis", "redis://", server, [proxy])


def _cluster_full(servers: Any) -> Seen:
    """With a proxy before each server of a cluster, which sends its clients there."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(SlowProxy(server.port)) for server in servers.servers]
        servers.announce([proxy.port for proxy in proxies])
        return _full_and_slow("cluster", "redis://", servers, proxies)


def _s3(server: Any, troubles: Callable[[FullProxy], Sequence[Trouble]]) -> Seen:
    """The course of these troubles, with a proxy before the server."""
    with FullProxy(server.port) as proxy:
        url = server.url_at("failing").replace(f":{server.port}", f":{proxy.port}")
        return _course("s3", url, "timeout=3&slow=1", *troubles(proxy), environment=server.client_environment)


def _s3_hung(server: Any) -> Seen:
    return _s3(server, lambda proxy: (
        Trouble("hung", server.hang, server.resume),
        _full("full (403)", lambda: proxy.full(QUOTA), lambda: proxy.full(None)),
        Trouble("slow", lambda: proxy.late(1.5), lambda: proxy.late(0.0)),
    ))  # fmt: skip


def _s3_killed(server: Any) -> Seen:
    return _s3(server, lambda proxy: (
        Trouble("killed", server.kill, server.start),
        _full("full (507)", lambda: proxy.full(DISKS), lambda: proxy.full(None)),
    ))  # fmt: skip


def _ceph(server: Any) -> Seen:
    return _course(
        "ceph", server.url, "timeout=3&slow=1", _full("full", lambda: server.limit(1 << 20), lambda: server.limit(0)),
        environment=server.client_environment,
    )  # fmt: skip


def _mooncake(server: Any) -> Seen:
    return _hung_and_killed("mooncake", server, options="timeout=3&slow=1")


def _mooncake_full(server: Any) -> Seen:
    return _course("mooncake", server.url, "timeout=3&slow=1", _for_a_while("full", 8.0))


def _mooncake_slow(server: Any) -> Seen:
    """The owner of the pages is slow, too: it does nothing for most of each second."""
    with SlowProxy(server.port) as proxy:
        return _course(
            "mooncake", server.url.replace(f":{server.port}", f":{proxy.port}"), "timeout=3&slow=0.5",
            Trouble("slow", lambda: proxy.late(0.7), lambda: proxy.late(0.0)),
            Trouble("slow owner", server.owner.stutter, server.owner.steady),
        )  # fmt: skip


def _file_full(folder: str) -> Seen:
    seen = _course("file", f"file:{folder}/full", "capacity=4MiB", _for_a_while("full", 6.0))
    assert seen.report["storage"]["reclaimed_segments"] > 0
    return seen


def _file_faulty(folder: str) -> Seen:
    """Calls fail, are late and lie, and so do copies."""
    seen = _course("file", f"file:{folder}/faulty", "capacity=1GiB", _for_a_while("faulty", 6.0, lies=True),
                   words=("--faults", "0.2"))  # fmt: skip
    assert seen.report["storage"]["corrupt_pages"] > 0
    return seen


def _for_a_while(name: str, seconds: float, lies: bool = False) -> Trouble:
    return Trouble(name, lambda: None, lambda: None, seconds, opens=False, gives=True, lies=lies)


def _full(name: str, fill: Callable[[], object], empty: Callable[[], object]) -> Trouble:
    """The store takes nothing more, and gives what it has."""
    return Trouble(name, fill, empty, 5.0, opens=False, gives=True)


COURSES = {
    "a folder that is full from the first seconds on": Course("file", TemporaryDirectory, _file_full, 10),
    "a folder on which calls fail and lie": Course("file", TemporaryDirectory, _file_faulty, 9),
    "redis hung, killed, emptied": Course("redis", RedisServer, _redis, 30),
    "redis full, slow": Course("redis", RedisServer, _redis_full, 17),
    "cluster hung, killed": Course("cluster", RedisCluster, partial(_hung_and_killed, "cluster")),
    "cluster full, slow": Course("cluster", RedisCluster, _cluster_full),
    "s3 hung, over its quota, slow": Course("s3", MotoServer, _s3_hung, 30),
    "s3 killed, full": Course("s3", MotoServer, _s3_killed),
    "mooncake hung, killed": Course("mooncake", partial(MooncakeMaster, segment=256), _mooncake),
    "mooncake slow, and so its owner": Course("mooncake", partial(MooncakeMaster, segment=256), _mooncake_slow),
    "mooncake full": Course("mooncake", partial(MooncakeMaster, segment=16), _mooncake_full, 12),
    "ceph over its quota": Course("ceph", CephServer, _ceph, 60),
}


STORES = list(dict.fromkeys(course.store for course in COURSES.values()))


def of(store: str) -> list[str]:
    """The courses of one store."""
    return [name for name, course in COURSES.items() if course.store == store]


def measured(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One course after the other, each beside a run without L3 of its own. Of a store that fails, the rest is left."""
    for name in names:
        try:
            for course in of(name):
                yield figures(run(course), alone())
        except AssertionError as error:
            sys.stderr.write(f"{name}: {error}\n")


def main() -> int:
    """What the command does; its status."""
    parser = argparse.ArgumentParser(description="What a cache does while its store fails.")
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"{', '.join(STORES)} (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    names = options.stores or [name for name in STORES if name != "ceph" or shutil.which(CephServer.program)]
    found = list(measured(names))
    text = json.dumps(found, indent=2) + "\n"
    sys.stdout.write(text)
    if options.json is not None:
        options.json.write_text(text)
    return int(len(found) < sum(len(of(name)) for name in names))


if __name__ == "__main__":
    sys.exit(main())
