"""What the worlds are like: the settings of small caches, and all that is drawn for a world from its seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from asynccache import CacheConfig, Full, Mamba, Replicated, Sidecar, SlidingWindow
from asynccache.config import Component
from asynccache.core.settings import PrefetchPolicy, WritePolicy
from asynccache.memory.host_copies import Faults
from asynccache.worker import Topology
from tests.simulated.backend import HONEST, Hostility

PAGE = 4
LAYERS = 2
STORE = "sim:main?name=main"
GUEST = "sim:guest?name=guest"
SHAPES = (
    *[Topology()] * 2, *[Topology(tp=2)] * 5, Topology(tp=7), *[Topology(pp=2)] * 5, *[Topology(cp=2)] * 3,
    *[Topology(tp=3)] * 2, *[Topology(tp=2, pp=2)] * 3, *[Topology(tp=2, cp=2)] * 3, Topology(cp=2, pp=2),
    Topology(tp=2, pp=3), Topology(tp=2, cp=2, pp=2), Topology(tp=8), Topology(pp=5),
)  # fmt: skip


def text(pages: int, seed: int = 0, extra: int = 0) -> list[int]:
    """Tokens of so many whole pages and ``extra`` more; different seeds share no page."""
    return [seed * 100_000 + i for i in range(pages * PAGE + extra)]


def settings(
    device: int = 16, host: int = 0, *, swa: int = 0, mamba: int = 0, window: int = 8,
    sidecars: tuple[Sidecar, ...] = (), stored: bool = False, replicated: Replicated = Replicated.NO,
    layers: int = LAYERS, logical: bool = False, **more: Any,
) -> CacheConfig:  # fmt: skip
    """Pages (of ``PAGE`` tokens) of FULL on each tier; SWA pages and MAMBA states. ``stored``: with a store.
    ``logical``: FULL without bytes."""
    components: list[Component] = [
        Full(bytes_per_token=0 if logical else 16, device_tokens=device * PAGE, host_tokens=host * PAGE,
             layers=1 if logical else layers, replicated=replicated)
    ]  # fmt: skip
    if swa:
        components.append(SlidingWindow(
            window=window, bytes_per_token=8, device_tokens=swa * PAGE, host_tokens=(host and 2 * swa) * PAGE,
            layers=layers, replicated=replicated,
        ))  # fmt: skip
    if mamba:
        components.append(Mamba(state_bytes=64, device_states=mamba, host_states=host and 2 * mamba, layers=layers))
    more = {"prefetch_threshold": PAGE, **({"storage": STORE} if stored else {}), **more}
    return CacheConfig(model="test", components=tuple(components), page_size=PAGE, sidecars=sidecars, **more)


def deepseek(device: int = 16, host: int = 0, *, layers: int = 1, **more: Any) -> CacheConfig:
    """DeepSeek-V4's stack: FULL is logical; compressed KV hangs on it, compressor states on the window. Ranks of tp
    hold all of it alike."""
    pools = (("c4", "full", 8), ("c4_indexer", "c4", 6), ("c128", "full", 4), ("c4_state", "swa", 10))
    sidecars = tuple(
        Sidecar(name=name, indices_from=source, bytes_per_page=size * layers, layers=layers, replicated=Replicated.TP)
        for name, source, size in pools
    )
    return settings(device, host, swa=device, sidecars=sidecars, layers=layers, logical=True, **more,
                    replicated=Replicated.TP)  # fmt: skip


class Climate(NamedTuple):
    """The settings of a world. ``calm``: nothing goes wrong in it. ``faults``, ``loads``, ``hostility``, ``delays``:
    of each rank's device, its copies from the host, its store and link. ``cancel``, ``disturb``: the shares of requests
    that are cancelled at a random await, and beside which something else is done. ``unable``: the share of batches that
    an engine cannot run. ``pressure``: the share of attempts before which the device is emptied, so that what is cached
    is on the host. ``leads``: whether its ``p2c`` is one that leads, see ``leading``. ``fate``: what befalls
    ``victim``, if any."""

    topology: Topology
    own: int | None
    config: CacheConfig
    shared: bool
    calm: bool
    faults: Mapping[int, Faults]
    hostility: Mapping[int, Hostility]
    delays: Mapping[int, float]
    lag: float
    requests: int
    concurrency: int
    cancel: float
    unable: float
    disturb: float
    fate: str
    victim: int
    loads: Mapping[int, Faults]
    pressure: float
    leads: bool


def draw(seed: int, fates: Callable[[bool], Sequence[str]] = lambda host: ()) -> Climate:
    """The climate of a seed. ``fates``: the accidents that there are, with and without a host."""
    random = Random(f"{seed}/climate")
    topology = random.choice(SHAPES)
    own = random.choice((0, 0, None, topology.ranks - 1))
    calm = random.random() < 0.3
    others = [rank for rank in range(topology.ranks) if rank != own]
    config = _config(random, calm)
    names = fates(config.pools()[0].host_pages > 0)
    fate = random.choice(names) if names and others and not calm and random.random() < 0.3 else ""
    ranks = range(topology.ranks)
    return Climate(
        topology=topology, own=own, config=config, shared=random.random() < 0.5, calm=calm,
        faults={} if calm else {rank: _faults(random, seed + rank, (0.0, 0.0, 0.0, 0.1, 0.3), 0.2) for rank in ranks},
        hostility={} if calm else {rank: _hostility(random) for rank in ranks},
        delays={rank: random.choice((0.0001, 0.001, 0.001, 0.02)) for rank in ranks},
        lag=random.choice((0.0, 0.005, 0.02)), requests=random.randint(3, 5), concurrency=random.randint(1, 3),
        cancel=0.0 if calm else random.choice((0.0, 0.2, 0.5)), unable=0.0 if calm else random.choice((0.0, 0.1, 0.3)),
        disturb=0.0 if calm else random.choice((0.0, 0.3)), fate=fate, victim=random.choice(others) if fate else 0,
        loads={} if calm else {rank: _faults(random, seed + rank, (0.0, 0.0, 0.2, 0.5), 0.3) for rank in ranks},
        pressure=random.choice((0.0, 0.5, 0.9)) if config.pools()[0].host_pages else 0.0,
        leads=Random(f"{seed}/eviction").random() < 0.5,
    )  # fmt: skip


def _faults(random: Random, seed: int, shares: Sequence[float], delayed: float) -> Faults:
    failing = random.choice(shares)
    return Faults(seed=seed, delayed=random.choice((0.0, delayed)), failing=failing, delay=(0.001, 0.02))


def _hostility(random: Random) -> Hostility:
    if random.random() < 0.5:
        return HONEST
    return Hostility(
        delay=random.choice((0.0, 0.003, 0.02)), vanished=random.choice((0.0, 0.1)),
        **{name: random.choice((0.0, 0.0, 0.1, 0.3)) for name in ("unavailable", "failed", "wrong", "short", "empty")},
    )  # fmt: skip


def _config(random: Random, calm: bool) -> CacheConfig:
    """In a calm world all is stored and found again."""
    device, host = random.choice((7, 8, 10)), random.choice((0, 8, 24, 24))
    more: dict[str, Any] = {
        "layers": random.choice((1, 1, 2)), "stored": bool(host) and random.random() < 0.85,
        "write_policy": random.choice((*[WritePolicy.WRITE_THROUGH] * 3, *WritePolicy)),
        "prefetch_policy": random.choice(list(PrefetchPolicy)), "prefetch_timeout_base": 0.05, "prefetch_quota": 1.0,
        "load_back_threshold": random.choice((0, 0, 8)), "max_backup_ops": random.choice((1, 4, 256)),
        "window": random.choice((3, 6, 10)), "close_timeout": 20.0,
    }  # fmt: skip
    if calm:
        more |= {"write_policy": WritePolicy.WRITE_THROUGH, "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
                 "load_back_threshold": 0, "backup_quota": 1.0}  # fmt: skip
    kind = random.choice(("full", "mla", "window", "window", "state", "all", "all", "deepseek"))
    if kind == "deepseek":
        return deepseek(device, host, **more)
    if kind in ("window", "all"):
        more["swa"] = random.choice((7, device))
    if kind in ("state", "all"):
        more["mamba"] = random.choice((6, 10))
    if kind == "mla" or random.random() < 0.15:
        more["replicated"] = random.choice((Replicated.TP, Replicated.TP, Replicated.TP_CP))
    if kind == "all" or random.random() < 0.2:
        more["sidecars"] = _sidecars(random, [name for name in ("full", "swa", "mamba") if name in ("full", *more)])
    return settings(device, host, **more)


def _sidecars(random: Random, sources: list[str]) -> tuple[Sidecar, ...]:
    sidecars = []
    for number in range(random.randint(1, 3)):
        sidecars.append(Sidecar(name=f"side{number}", indices_from=random.choice(sources), bytes_per_page=6,
                                layers=random.choice((1, 2)), replicated=random.choice(list(Replicated))))  # fmt: skip
        sources.append(f"side{number}")
    return tuple(sidecars)
