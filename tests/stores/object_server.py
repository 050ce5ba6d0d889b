"""Object stores on loopback: S3 by moto and by Ceph, and Azure's blob storage by azurite."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from typing import Self
from urllib.request import Request, urlopen

from tests.stores.server import HOST, CannotStart, NowhereRequired, Server, await_start, path_of

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "asynccache", "AWS_SECRET_ACCESS_KEY": "asynccache-secret"}
"""Any will do for ``moto_server``, but some must be."""


class BucketServer(Server):
    """One with a bucket, which it has again whenever it starts; what was stored before is gone.

    Subclasses say ``url_at(prefix)``, which is what ``--storage`` takes, and ``creation()``, the request for a bucket.
    """

    client_environment: Mapping[str, str] = CREDENTIALS

    @property
    def url(self) -> str:
        return self.url_at("kv")

    def url_at(self, prefix: str) -> str:
        raise NotImplementedError

    def creation(self) -> Request:
        raise NotImplementedError

    def start(self) -> Self:
        super().start()
        self.make_bucket()
        return self

    def make_bucket(self) -> None:
        """Raises CannotStart if it refuses for long."""
        why = ""

        def made() -> bool:
            nonlocal why
            try:
                with urlopen(self.creation(), timeout=10):
                    return True
            except OSError as error:
                why = str(error)
                return False

        try:
            await_start(made, lambda: f"{self.program} makes no bucket: {why} {self.log[-300:]}", self.ready_within)
        except CannotStart:
            self.kill()
            raise


class S3Server(BucketServer):
    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    def url_at(self, prefix: str) -> str:
        return f"s3://bucket/{prefix}?endpoint={self.endpoint}&region=us-east-1"


class MotoServer(S3Server):
    """``moto_server``, in memory; it enforces create-if-absent."""

    program = "moto_server"
    hint = "pip install 'moto[server]'"

    def command(self, program: str) -> Sequence[str]:
        return [program, "-H", HOST, "-p", str(self.port)]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONWARNINGS": "ignore"}

    def creation(self) -> Request:
        return Request(f"{self.endpoint}/bucket", method="PUT")


ACCOUNT = "asynccache"
KEY = base64.b64encode(hashlib.sha512(b"known to everybody").digest()).decode()
VERSION = "2021-12-02"


class Azurite(BucketServer):
    """Azure's blob storage: ``azurite``, from npm, in memory. Nowhere required: its tests skip where it or node is
    missing."""

    program = "azurite-blob"
    hint = "npm install -g azurite"
    missing = NowhereRequired
    client_environment: Mapping[str, str] = {"AZURE_STORAGE_ACCOUNT_KEY": KEY}

    @property
    def endpoint(self) -> str:
        """Where its account is."""
        return f"http://{HOST}:{self.port}/{ACCOUNT}"

    def url_at(self, prefix: str) -> str:
        return f"az://container/{prefix}?endpoint={self.endpoint}&account={ACCOUNT}"

    def command(self, program: str) -> Sequence[str]:
        return [program, "--blobHost", HOST, "--blobPort", str(self.port),
                "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}

    def creation(self) -> Request:
        """As Azure signs them: all that is needed here."""
        date = formatdate(usegmt=True)
        lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{VERSION}",
                 f"/{ACCOUNT}/{ACCOUNT}/container", "restype:container"]  # fmt: skip
        digest = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
        signature = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        return Request(f"{self.endpoint}/container?restype=container", method="PUT",
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

    def __init__(self) -> None:
        super().__init__()
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
        except BaseException:
            self.kill()
            raise
        return self

    def make_bucket(self) -> None:
        self.run("radosgw-admin", "user", "create", "--uid=asynccache", "--display-name=asynccache",
                 f"--access-key={CREDENTIALS['AWS_ACCESS_KEY_ID']}",
                 f"--secret-key={CREDENTIALS['AWS_SECRET_ACCESS_KEY']}")
        super().make_bucket()

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
        await_start(lambda: " 1 up" in self.run("ceph", "osd", "stat"), lambda: "the OSD does not come up", PATIENCE)

    def creation(self) -> Request:
        """As S3 signed them first: all that is needed here."""
        date = formatdate(usegmt=True)
        secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
        digest = hmac.new(secret, f"PUT\n\n\n{date}\n/bucket".encode(), hashlib.sha1).digest()
        signature = f"AWS {CREDENTIALS['AWS_ACCESS_KEY_ID']}:{base64.b64encode(digest).decode()}"
        return Request(f"{self.endpoint}/bucket", method="PUT", headers={"Date": date, "Authorization": signature})


class _Daemon(Server):
    """The monitor or the OSD of a cluster."""

    hint = HINT
    ready_within = PATIENCE

    def __init__(self, cluster: CephServer, program: str, words: Sequence[str]) -> None:
        super().__init__()
        self.program = program
        self._cluster = cluster
        self._words = words

    def command(self, program: str) -> Sequence[str]:
        return [program, "-f", *self._words, "-c", self._cluster.configuration]

    def ready(self) -> bool:
        """The monitor listens; of the OSD the monitor knows."""
        return super().ready() if self.program == "ceph-mon" else True
