"""The settings in a mooncake URL, and the keys that pages have in the store."""

from __future__ import annotations

import re

import pytest
from asynccache_backends.mooncake.client import settings_of

from asynccache.errors import ConfigError
from asynccache.storage import HostPort, parse_url

KEY = bytes(range(32))


def test_a_url_with_nothing_but_a_master_is_a_pure_client() -> None:
    settings = settings_of(parse_url("mooncake://10.0.0.1:51000"))
    assert settings.master == HostPort("10.0.0.1", 51000)
    assert (settings.segment, settings.buffer) == (0, 16 << 20)
    assert (settings.protocol, settings.metadata) == ("tcp", "P2PHANDSHAKE")
    assert (settings.replicas, settings.threads, settings.admin) == (1, 1, None)


def test_all_options() -> None:
    settings = settings_of(
        parse_url(
            "mooncake://[::1]?segment=512MiB&buffer=32MiB&protocol=rdma&device=mlx5_0&metadata=http://m:8080/metadata"
            "&host=10.0.0.7&replicas=2&threads=3&namespace=team/a.&admin=10.0.0.1:9003"
        )
    )
    assert str(settings.master) == "[::1]:50051"
    assert (settings.segment, settings.buffer) == (512 << 20, 32 << 20)
    assert (settings.protocol, settings.device) == ("rdma", "mlx5_0")
    assert settings.metadata == "http://m:8080/metadata"
    assert (settings.host, settings.admin) == ("10.0.0.7", HostPort("10.0.0.1", 9003))
    assert (settings.replicas, settings.threads) == (2, 3)
    assert settings.name(KEY).startswith("team/a.")


@pytest.mark.parametrize(
    "url",
    [
        "mooncake:",
        "mooncake://",
        "mooncake://a b:1",
        "mooncake://host:0",
        "mooncake://host:65536",
        "mooncake://host:1/path",
        "mooncake://user:secret@host:1",
        "mooncake://host:1?replicas=0",
        "mooncake://host:1?replicas=many",
        "mooncake://host:1?threads=17",
        "mooncake://host:1?protocol=udp",
        "mooncake://host:1?segment=big",
        "mooncake://host:1?namespace=a*",
        "mooncake://host:1?namespace=",
        "mooncake://host:1?namespace=" + "x" * 65,
        "mooncake://host:1?metadata=file:///etc/passwd",
        "mooncake://host:1?metadata=http://user:secret@host/",
        "mooncake://host:1?admin=host",
        "mooncake://host:1?size=1",
    ],
)
def test_what_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        settings_of(parse_url(url))


def test_names_are_a_namespace_and_hex_and_lead_back() -> None:
    settings = settings_of(parse_url("mooncake://h:1?namespace=a.b-"))
    name = settings.name(KEY)
    assert name == "a.b-" + KEY.hex()
    assert settings.key_of(name) == KEY
    for other in ("aXb-" + KEY.hex(), name + "0", name[:-1], "x" + name, name.upper(), "a.b-" + "g" * 64, name + "\n"):
        assert settings.key_of(other) is None


def test_the_pattern_finds_its_own_namespace_and_no_other() -> None:
    settings = settings_of(parse_url("mooncake://h:1?namespace=a.b"))
    assert re.search(settings.pattern, settings.name(KEY))
    assert not re.search(settings.pattern, "aXb" + KEY.hex())
    assert not re.search(settings.pattern, "z" + settings.name(KEY))
    assert not re.search(settings.pattern, "a.bc" + KEY.hex())


def test_keys_of_one_namespace_meet_no_longer_one() -> None:
    """A namespace that ends in hex digits must not make a shorter one's pattern match."""
    short, long = (settings_of(parse_url(f"mooncake://h:1?namespace={name}")) for name in ("n", "n00"))
    assert short.key_of(long.name(KEY)) is None
