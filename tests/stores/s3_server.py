"""S3 on loopback: ``moto_server``, in memory, enforces create-if-absent. Any credentials will do, but some must be."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.stores.server import HOST, READY_WITHIN, CannotStart, Server

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "asynccache", "AWS_SECRET_ACCESS_KEY": "asynccache-secret"}


class MotoServer(Server):
    """It holds nothing after its process has ended, and has its bucket again whenever it starts."""

    program = "moto_server"
    hint = "pip install 'moto[server]'"
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
