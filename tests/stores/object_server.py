"""Object stores on loopback: S3 by moto and by Ceph, and Azure's blob storage by azurite."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from typing import Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.stores.server import HOST, READY_WITHIN, CannotStart, NowhereRequired, Server, free_port, path_of

# S3 on loopback: ``moto_server``, in memory, enforces create-if-absent. Any credentials will do, but some must be.


CREDENTIALS = {"AWS_ACCESS_KEY_ID": "asynccache", "AWS_SECRET_ACCESS_KEY": "asynccache-secret"}


class S3Server(Server):
    """One with a bucket."""

    bucket = "bucket"
    prefix = "kv"

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return self.url_at(self.prefix)

    def url_at(self, prefix: str) -> str:
        """What ``--storage`` takes, for another prefix in the same bucket."""
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    @property
    def client_environment(self) -> Mapping[str, str]:
        """What a client needs in its environment."""
        return CREDENTIALS


class MotoServer(S3Server):
    """It holds nothing after its process has ended, and has its bucket again whenever it starts."""

    program = "moto_server"
    hint = "pip install 'moto[server]'"

    def command(self, program: str) -> Sequence[str]:
        return [program, "-H", HOST, "-p", str(self.port)]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONWARNINGS": "ignore"}

    def start(self) -> Self:
        super().start()
        self.make_bucket()
        return self

    def make_bucket(self) -> None:
        """Raises CannotStart if it refuses for long."""
        end = time.monotonic() + READY_WITHIN
        while time.monotonic() < end:
            with suppress(URLError, OSError):
                request = Request(f"{self.endpoint}/{self.bucket}", method="PUT")
                with urlopen(request, timeout=5):
                    return
            time.sleep(0.05)
        self.kill()
        raise CannotStart(f"{self.program} makes no bucket: {self.log[-300:]}")


# Azure's blob storage on loopback: ``azurite``, from npm, in memory. Nowhere required: its tests skip where it or node
# is missing.


ACCOUNT = "asynccache"
KEY = base64.b64encode(hashlib.sha512(b"known to everybody").digest()).decode()
VERSION = "2021-12-02"


class Azurite(Server):
    """It holds nothing after its process has ended, and has its container again whenever it starts."""

    program = "azurite-blob"
    hint = "npm install -g azurite"
    missing = NowhereRequired
    container = "container"

    @property
    def endpoint(self) -> str:
        """Where its account is."""
        return f"http://{HOST}:{self.port}/{ACCOUNT}"

    @property
    def url(self) -> str:
        return self.url_at("kv")

    def url_at(self, prefix: str) -> str:
        """What ``--storage`` takes, for another prefix in the same container."""
        return f"az://{self.container}/{prefix}?endpoint={self.endpoint}&account={ACCOUNT}"

    @property
    def client_environment(self) -> Mapping[str, str]:
        """What a client needs in its environment."""
        return {"AZURE_STORAGE_ACCOUNT_KEY": KEY}

    def command(self, program: str) -> Sequence[str]:
        return [program, "--blobHost", HOST, "--blobPort", str(self.port),
                "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}

    def start(self) -> Self:
        super().start()
        end, why = time.monotonic() + READY_WITHIN, ""
        while time.monotonic() < end:
            try:
                with urlopen(self._signed(), timeout=5):
                    return self
            except (URLError, OSError) as error:
                why = str(error)
            time.sleep(0.05)
        self.kill()
        raise CannotStart(f"{self.program} makes no container: {why}")

    def _signed(self) -> Request:
        """The request for a container, as Azure signs them: all that is needed here."""
        date = formatdate(usegmt=True)
        lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{VERSION}",
                 f"/{ACCOUNT}/{ACCOUNT}/{self.container}", "restype:container"]  # fmt: skip
        digest = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
        signature = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        return Request(f"{self.endpoint}/{self.container}?restype=container", method="PUT",
                       headers={"x-ms-date": date, "x-ms-version": VERSION, "Authorization": signature})  # fmt: skip


# S3 by Ceph on loopback: a monitor, one OSD that keeps everything in memory, and ``radosgw``. Needs a larger machine
# and half a minute to start; ``make stores-up S3=ceph``. Same bucket and credentials as ``MotoServer``.


HINT = "make stores-install S3=ceph"
MEMORY = 2 << 30
PATIENCE = 120.0

CONFIGURATION = """\
[global]
fsid = {fsid}
mon_host = [v2:{host}:{mon}]
public_addr = {host}
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
run_dir = {folder}
log_file =
admin_socket =
osd_objectstore = memstore
memstore_device_bytes = {memory}
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 2
osd_pool_default_pgp_num = 2
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
rgw_thread_pool_size = 64
keyring = {folder}/keyring
[osd]
keyring = {folder}/osd/keyring
"""


class CephServer(S3Server):
    """The gateway; the monitor and the OSD behind it come and go with it."""

    program = "radosgw"
    hint = HINT
    missing = NowhereRequired
    ready_within = PATIENCE

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self._fsid = str(uuid.uuid4())
        self._monitor = _Daemon(self, "ceph-mon", ["-i", "a"])
        self._osd = _Daemon(self, "ceph-osd", ["-i", "0"])

    @property
    def configuration(self) -> str:
        """The path of it."""
        return str(self.folder / "ceph.conf")

    def command(self, program: str) -> Sequence[str]:
        endpoint = f"beast endpoint={HOST}:{self.port}"
        return [program, "-f", "-c", self.configuration, "-n", "client.admin", f"--rgw_frontends={endpoint}"]

    def start(self) -> Self:
        """From nothing: what was stored before is gone."""
        self.installed()
        try:
            self._start_monitor()
            self._start_osd()
            super().start()
            self.run("radosgw-admin", "user", "create", "--uid=asynccache", "--display-name=asynccache",
                     f"--access-key={CREDENTIALS['AWS_ACCESS_KEY_ID']}",
                     f"--secret-key={CREDENTIALS['AWS_SECRET_ACCESS_KEY']}")
            self._make_bucket()
        except BaseException:
            self.kill()
            raise
        return self

    def limit(self, size: int) -> None:
        """How many bytes its user may store; 0: any number."""
        who = ("--quota-scope=user", "--uid=asynccache")
        if size:
            self.run("radosgw-admin", "quota", "set", *who, f"--max-size={size}")
        self.run("radosgw-admin", "quota", "enable" if size else "disable", *who)

    def kill(self) -> None:
        """All three."""
        super().kill()
        self._osd.kill()
        self._monitor.kill()

    def close(self) -> None:
        """Kill them and remove their folders."""
        super().close()
        self._osd.close()
        self._monitor.close()

    def run(self, program: str, *words: str) -> str:
        """One of Ceph's tools; what it prints. Raises CannotStart if it fails."""
        command = [path_of(program, install=HINT), "-c", self.configuration, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise CannotStart(f"{program} {words[0]} does not end") from None
        if done.returncode:
            raise CannotStart(f"{program} {' '.join(words[:2])}: {(done.stderr or done.stdout)[-500:]}")
        return done.stdout

    def _start_monitor(self) -> None:
        for name in ("mon", "osd", "rgw"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        (self.folder / "ceph.conf").write_text(CONFIGURATION.format(
            fsid=self._fsid, host=HOST, mon=self._monitor.port, folder=self.folder, memory=MEMORY))
        known = str(self.folder / "monmap")
        self.run("monmaptool", "--create", "--clobber", "--fsid", self._fsid, "--addv", "a",
                 f"[v2:{HOST}:{self._monitor.port}]", known)
        keyring = str(self.folder / "keyring")
        everything = [word for daemon in ("mon", "osd", "mgr") for word in ("--cap", daemon, "allow *")]
        self.run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self.run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *everything)
        self.run("ceph-mon", "-i", "a", "--mkfs", "--monmap", known, "--keyring", keyring)
        self._monitor.start()

    def _start_osd(self) -> None:
        own = str(uuid.uuid4())
        self.run("ceph", "osd", "new", own)
        self.run("ceph", "auth", "get-or-create", "osd.0", "mon", "allow profile osd", "osd", "allow *",
                 "-o", str(self.folder / "osd" / "keyring"))
        self.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", own)
        self._osd.start()
        until = time.monotonic() + PATIENCE
        while " 1 up" not in self.run("ceph", "osd", "stat"):
            if time.monotonic() > until:
                raise CannotStart("the OSD does not come up")
            time.sleep(0.2)

    def _make_bucket(self) -> None:
        until, why = time.monotonic() + PATIENCE, ""
        while time.monotonic() < until:
            try:
                with urlopen(self._signed("PUT", f"/{self.bucket}"), timeout=10):
                    return
            except (URLError, OSError) as error:
                why = str(error)
            time.sleep(0.2)
        raise CannotStart(f"radosgw makes no bucket: {why}")

    def _signed(self, method: str, path: str) -> Request:
        """A request as S3 signed them first: all that is needed here."""
        date = formatdate(usegmt=True)
        secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
        digest = hmac.new(secret, f"{method}\n\n\n{date}\n{path}".encode(), hashlib.sha1).digest()
        signature = f"AWS {CREDENTIALS['AWS_ACCESS_KEY_ID']}:{base64.b64encode(digest).decode()}"
        return Request(self.endpoint + path, method=method, headers={"Date": date, "Authorization": signature})


class _Daemon(Server):
    """The monitor or the OSD of a cluster."""

    hint = HINT
    ready_within = PATIENCE

    def __init__(self, cluster: CephServer, program: str, words: Sequence[str]) -> None:
        super().__init__(free_port())
        self.program = program
        self._cluster = cluster
        self._words = words

    def command(self, program: str) -> Sequence[str]:
        return [program, "-f", *self._words, "-c", self._cluster.configuration]

    def ready(self) -> bool:
        """The monitor listens; of the OSD the monitor knows."""
        return super().ready() if self.program == "ceph-mon" else True
