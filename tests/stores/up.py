"""The real stores on loopback, for CI and for a person: ``python tests/stores/up.py install|up|down``.

What runs is in ``build/stores/running.json``: the process groups, each with the start time of its leader, so that
nothing is ended that has only inherited a number. What the stores hold is thrown away with them. A store that cannot
start is said, and makes the status 1; the others start all the same. Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))                          # also when it is run as a file

from tests.stores.server import CannotStart  # noqa: E402

ENDS_WITHIN = 5.0


class Kind(NamedTuple):
    """A store: the class that runs it, and what Debian has to install for it: programs and libraries, each with its
    package."""

    module: str
    name: str
    programs: dict[str, str]
    libraries: dict[str, str]


KINDS = {
    "redis": Kind("redis_server", "RedisServer", {"redis-server": "redis-server"}, {}),
    "redis-cluster": Kind("redis_server", "RedisCluster", {"redis-server": "redis-server"}, {}),
    "s3": Kind("object_server", "MotoServer", {}, {}),
    "mooncake": Kind("mooncake_server", "MooncakeMaster", {}, {"ibverbs": "libibverbs1", "numa": "libnuma1"}),
}
CEPH = Kind("object_server", "CephServer",
            {"ceph-mon": "ceph-mon", "ceph-osd": "ceph-osd", "radosgw": "radosgw", "ceph": "ceph-common"}, {})


class Running(TypedDict):
    """What is remembered of a store. ``groups``: process group, and when its leader was started."""

    url: str
    environment: dict[str, str]
    groups: list[tuple[int, int]]
    folder: str


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; the exit status is 1 if something that was asked for is not there."""
    parser = argparse.ArgumentParser(prog="up.py", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("action", choices=("install", "up", "down"))
    parser.add_argument("--s3", choices=("moto", "ceph"), default="moto", help="which S3 server (default: moto)")
    parser.add_argument("--only", metavar="NAMES", default=",".join(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "stores", help="where they live")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(KINDS)):
        parser.error(f"no such store: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    kinds = {name: CEPH if (name, args.s3) == ("s3", "ceph") else KINDS[name] for name in names}
    if args.action == "install":
        return install(kinds)
    stores = Stores(args.folder)
    if args.action == "up":
        return up(stores, kinds)
    return down(stores, names)


# what the system has to have


def missing(kinds: dict[str, Kind]) -> list[str]:
    """The packages without which one of them cannot run."""
    found = set()
    for kind in kinds.values():
        found |= {package for program, package in kind.programs.items() if not on_path(program)}
        found |= {package for library, package in kind.libraries.items() if not ctypes.util.find_library(library)}
    return sorted(found)


def on_path(program: str) -> bool:
    """Whether it is there; a daemon may be where only root looks."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def install(kinds: dict[str, Kind]) -> int:
    """Install what is missing, and nothing else. Where that is not ours to do, say how."""
    packages = missing(kinds)
    if not packages:
        return 0
    if shutil.which("apt-get") is None:
        print(f"stores: please install {' '.join(packages)} (names of Debian's packages): there is no apt-get here")
        return 0
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        print(f"stores: please run: sudo {' '.join(command)}")
        return 0
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(words, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"stores: {' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return 0 if done.returncode == 0 else 1


# what runs


class Stores:
    """What is remembered of the stores that were started from one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._file = self.folder / "running.json"
        self.running: dict[str, Running] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def save(self) -> None:
        """Write it down, whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.running, indent=2) + "\n")
        new.replace(self._file)

    def alive(self, name: str) -> bool:
        """Whether every process of it is still the one that was started."""
        groups = self.running[name]["groups"] if name in self.running else []
        return bool(groups) and all(started_at(pid) == when for pid, when in groups)


def up(stores: Stores, kinds: dict[str, Kind]) -> int:
    """Start what does not run, wait until it serves, and say where everything is."""
    refused = {}
    for name, kind in kinds.items():
        if stores.alive(name):
            continue
        end(stores, name)
        print(f"{name}: starting", file=sys.stderr, flush=True)
        try:
            stores.running[name] = start(kind, stores.folder / name)
        except (CannotStart, ImportError) as error:
            refused[name] = str(error)
            shutil.rmtree(stores.folder / name, ignore_errors=True)
        stores.save()
    show(stores)
    for name, reason in refused.items():
        print(f"\n{name} CANNOT START: {reason}", file=sys.stderr)
    return 1 if refused else 0


def start(kind: Kind, folder: Path) -> Running:
    """A server that outlives this process.

    Raises:
        CannotStart: as it says. ImportError: there is no such server in this checkout.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tempfile.tempdir = str(folder)                     # so that it is found again, and goes with the store
    before = set(children())
    module = importlib.import_module(f"tests.stores.{kind.module}")
    server: Any = getattr(module, kind.name)()
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    ours = [(pid, when) for pid in children() if pid not in before and (when := started_at(pid))]
    return {"url": server.url, "environment": dict(getattr(server, "client_environment", {})),
            "groups": ours, "folder": str(folder)}


def down(stores: Stores, names: Sequence[str]) -> int:
    """End them, and what they held with them."""
    for name in names:
        if end(stores, name):
            print(f"{name}: ended")
    stores.save()
    return 0


def end(stores: Stores, name: str) -> bool:
    """End one store; whether it was known."""
    known = stores.running.pop(name, None)
    if known is None:
        return False
    groups = [pid for pid, when in known["groups"] if started_at(pid) == when]
    for number in (signal.SIGCONT, signal.SIGTERM):
        tell(groups, number)
    until = time.monotonic() + ENDS_WITHIN
    while any(map(started_at, groups)) and time.monotonic() < until:
        time.sleep(0.02)
    tell(groups, signal.SIGKILL)                       # also what its leader has left behind
    shutil.rmtree(known["folder"], ignore_errors=True)
    return True


def tell(groups: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each group that is still there."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


def show(stores: Stores) -> None:
    """A table of the stores, and what a client's environment needs."""
    width = max(map(len, stores.running), default=0)
    for name, known in stores.running.items():
        pids = " ".join(str(pid) for pid, _ in known["groups"])
        print(f"{name:{width}}  {f'pid {pids}' if stores.alive(name) else 'DEAD'}")
        print(f"{'':{width}}  {known['url']}")
    environment = {key: value for known in stores.running.values() for key, value in known["environment"].items()}
    if environment:
        print("\nfor the shell of those who use them:")
        for key, value in environment.items():
            print(f"  export {key}={shlex.quote(value)}")


def children() -> Iterator[int]:
    """The leaders of process groups that are this process's own."""
    for entry in Path("/proc").iterdir():
        fields = stat_fields(int(entry.name)) if entry.name.isdigit() else []
        if fields and int(fields[1]) == os.getpid() and fields[2] == entry.name:
            yield int(entry.name)


def started_at(pid: int) -> int:
    """When a process was started, in ticks since boot; 0: there is none, or it has ended."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else 0


def stat_fields(pid: int) -> list[str]:
    """What ``/proc/PID/stat`` says, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
