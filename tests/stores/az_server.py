"""Azure's blob storage on loopback: ``azurite``, from npm, in memory. Nowhere required: its tests skip where it or node
is missing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from typing import Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.stores.server import HOST, READY_WITHIN, CannotStart, NowhereRequired, Server

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
