"""The courses: what is done to each kind of store while the stress tool runs. Each returns what was seen, after it was
checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.stores.failing import Seen, Trouble, check, suffer
from tests.stores.server import HOST
from tests.stores.slow_proxy import DISKS, QUOTA, FullProxy, SlowProxy


def _course(name: str, url: str, options: str, *troubles: Trouble, **more: Any) -> Seen:
    seen = suffer(f"{url}{'&' if '?' in url else '?'}{options}", troubles, name=name, **more)
    check(seen, troubles)
    return seen


def redis(server: Any) -> Seen:
    """Hung, killed, and back with nothing."""
    return _course(
        "redis", server.url, "timeout=2&slow=0.5",
        Trouble("hung", server.hang, server.resume),
        Trouble("killed", server.kill, server.start),
        Trouble("emptied", lambda: server.restart(empty=True), lambda: None, seconds=3.0, opens=False),
    )  # fmt: skip


def redis_full(server: Any) -> Seen:
    """Full: it takes nothing more, and gives what it has. Slow: all of its answers are late, and they are used."""

    def limit(size: str) -> None:
        server.say("CONFIG", "SET", "maxmemory", size)

    with SlowProxy(server.port) as proxy:
        return _course(
            "redis", f"redis://{HOST}:{proxy.port}", "timeout=2&slow=0.5",
            _full("full", lambda: limit("1mb"), lambda: limit("0")),
            Trouble("slow", lambda: proxy.late(0.8), lambda: proxy.late(0.0)),
        )  # fmt: skip


def cluster(servers: Any) -> Seen:
    """All three hung; all three killed, and back with nothing."""
    return _course(
        "cluster", servers.url, "timeout=2&slow=0.5",
        Trouble("hung", servers.hang, servers.resume),
        Trouble("killed", servers.kill, servers.restart),
    )  # fmt: skip


def cluster_full(servers: Any) -> Seen:
    """All three full: they take nothing more, and give what they have. All three slow."""
    with _proxies(servers) as proxies:

        def late(seconds: float) -> None:
            for proxy in proxies:
                proxy.late(seconds)

        return _course(
            "cluster", "redis://" + ",".join(f"{HOST}:{proxy.port}" for proxy in proxies), "timeout=2&slow=0.5",
            _full("full", lambda: servers.say("CONFIG", "SET", "maxmemory", "1mb"),
                  lambda: servers.say("CONFIG", "SET", "maxmemory", "0")),
            Trouble("slow", lambda: late(0.8), lambda: late(0.0)),
        )  # fmt: skip


@contextmanager
def _proxies(servers: Any) -> Iterator[list[SlowProxy]]:
    """One before each server of a cluster, which sends its clients there."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(SlowProxy(server.port)) for server in servers.servers]
        servers.announce([proxy.port for proxy in proxies])
        try:
            yield proxies
        finally:
            servers.announce([0] * len(proxies))


def s3(server: Any) -> Seen:
    """Hung, over a quota, slow."""
    return _s3(server, lambda proxy: (
        Trouble("hung", server.hang, server.resume),
        _full("full (403)", lambda: proxy.full(QUOTA), lambda: proxy.full(None)),
        Trouble("slow", lambda: proxy.late(1.5), lambda: proxy.late(0.0)),
    ))  # fmt: skip


def s3_killed(server: Any) -> Seen:
    """Killed and back with nothing; its disks full."""
    return _s3(server, lambda proxy: (
        Trouble("killed", server.kill, server.start),
        _full("full (507)", lambda: proxy.full(DISKS), lambda: proxy.full(None)),
    ))  # fmt: skip


def _s3(server: Any, troubles: Callable[[FullProxy], Sequence[Trouble]]) -> Seen:
    """The course of these troubles, with a proxy before the server."""
    with FullProxy(server.port) as proxy:
        url = server.url_at("failing").replace(f":{server.port}", f":{proxy.port}")
        return _course("s3", url, "timeout=3&slow=1", *troubles(proxy), environment=server.client_environment)


def ceph_full(server: Any) -> Seen:
    """Over a real quota: it takes nothing more, and gives what it has."""
    return _course(
        "ceph", server.url, "timeout=3&slow=1",
        _full("full", lambda: server.limit(1 << 20), lambda: server.limit(0)),
        environment=server.client_environment,
    )  # fmt: skip


def mooncake(server: Any) -> Seen:
    """The master hung; killed, and back with nothing. It is not to be used for anything else."""
    return _course(
        "mooncake", server.url, "timeout=3&slow=1",
        Trouble("hung", server.hang, server.resume),
        Trouble("killed", server.kill, server.start),
    )  # fmt: skip


def mooncake_full(server: Any) -> Seen:
    """Its segment is full from the first seconds on."""
    return _course("mooncake", server.url, "timeout=3&slow=1", _for_a_while("full", 8.0))


def mooncake_slow(server: Any) -> Seen:
    """The master slow: all of its answers are late, and they are used. The owner of the pages slow: it does nothing for
    most of each second."""
    with SlowProxy(server.port) as proxy:
        return _course(
            "mooncake", server.url.replace(f":{server.port}", f":{proxy.port}"), "timeout=3&slow=0.5",
            Trouble("slow", lambda: proxy.late(0.7), lambda: proxy.late(0.0)),
            Trouble("slow owner", server.owner.stutter, server.owner.steady),
        )  # fmt: skip


def file_full(folder: Path) -> Seen:
    """Full from the first seconds on."""
    seen = _course("file", f"file:{folder}/full", "capacity=4MiB", _for_a_while("full", 6.0))
    assert seen.report["storage"]["reclaimed_segments"] > 0
    return seen


def file_faulty(folder: Path) -> Seen:
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
