"""Settings from a URL and from the environment. Secrets appear nowhere."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from asynccache_backends.redis.settings import RedisSettings, settings_of

from asynccache.errors import ConfigError
from asynccache.extras import install
from asynccache.storage import HostPort, parse_url
from tests.stores.redis_server import Certificate


def _of(url: str, **environment: str) -> RedisSettings:
    return settings_of(parse_url(url), {f"ASYNCCACHE_REDIS_{name}": value for name, value in environment.items()})


def test_a_host_is_enough() -> None:
    settings = _of("redis://kv.internal")
    assert settings == RedisSettings(seeds=(HostPort("kv.internal", 6379),))
    assert str(settings) == "redis://kv.internal:6379/0?prefix=asynccache:"


def test_everything_said() -> None:
    settings = _of(
        "redis://al%3Aice:s%40cret@[::1]:7000/3?prefix=team-a/llama:&ttl=12h&connections=2&stall=1.5&cluster=off"
    )
    assert settings.seeds == (HostPort("::1", 7000),)
    assert (settings.database, settings.username, settings.password) == (3, "al:ice", "s@cret")
    assert (settings.prefix, settings.ttl, settings.connections, settings.stall) == ("team-a/llama:", 43200, 2, 1.5)
    assert str(settings.seeds[0]) == "[::1]:7000"


def test_a_cluster_has_several_hosts() -> None:
    assert _of("redis://a:1,b,c:3?cluster=on").seeds == (HostPort("a", 1), HostPort("b", 6379), HostPort("c", 3))


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("90", 90), ("1.5m", 90), ("7d", 604800), ("0.0015", 0.002)])
def test_times(text: str, seconds: float) -> None:
    assert _of(f"redis://h?ttl={text}").ttl == seconds


def test_the_environment_says_what_the_url_leaves_out() -> None:
    environment = {"USERNAME": "u", "PASSWORD": "p"}
    for url, user, password in (
        ("redis://h", "u", "p"),
        ("redis://a:b@h", "a", "b"),
        ("redis://:b@h", "", "b"),
        ("redis://a@h", "a", "p"),
    ):
        settings = _of(url, **environment)
        assert (settings.username, settings.password) == (user, password)


def test_a_password_that_is_no_text_is_not_quoted() -> None:
    assert "hunter2" not in repr(_of("redis://h", PASSWORD="hunter2\udcff"))


def test_names_are_of_one_store() -> None:
    settings, longer = _of("redis://h?prefix=a:"), _of("redis://h?prefix=a:b")
    key = bytes(range(32))
    assert settings.key_of(b"a:" + key) == key
    assert [settings.key_of(name) for name in (b"a:b" + key, b"a:", b"b:" + key, b"")] == [None] * 4
    assert longer.key_of(b"a:" + key) is None
    assert _of("redis://h?prefix=a*[x]?^-\\").pattern == rb"a\*\[x\]\?\^\-\\*"


def test_certificates_by_url_and_environment(tmp_path: Path) -> None:
    made = Certificate(tmp_path)
    assert _of("redis://h").tls is None
    for settings in (
        _of(f"rediss://h?ca={made.certificate}&cert={made.certificate}&key={made.key}&tls_name=kv"),
        _of("rediss://h?tls_name=kv", CA=str(made.certificate), CERT=str(made.certificate), KEY=str(made.key)),
    ):
        assert settings.tls is not None
        assert settings.tls.verify_mode is ssl.CERT_REQUIRED
        assert settings.tls.check_hostname
        assert "localhost" in str(settings.tls.get_ca_certs())
        assert settings.tls_name == "kv"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis:", "host:port"),
        ("redis://h:0", "host:port"),
        ("redis://h:99999", "host:port"),
        ("redis://h,", "host:port"),
        ("redis://h/x", "database"),
        ("redis://h/-1", "database"),
        ("redis://h?prefix=", "prefix"),
        ("redis://h?prefix=a%20b", "prefix"),
        ("redis://h?prefix={a}", "prefix"),
        ("redis://h?prefix=a%0d%0a", "prefix"),
        ("redis://h?ttl=-1", "ttl"),
        ("redis://h?ttl=1w", "ttl"),
        ("redis://h?ttl=0.0001", "ttl"),
        ("redis://h?stall=0", "stall"),
        ("redis://h?stall=0.0001s", "stall"),
        ("redis://h?connections=0", "connections"),
        ("redis://h?cluster=maybe", "cluster"),
        ("redis://h?color=red", "color"),
        ("redis://h?prefix=a%0A", "prefix"),
        ("redis://h?connections=1.5", "connections"),
        ("redis://h/1000000", "database"),
        ("redis://h?ttl=none", "ttl"),
        ("rediss://h?ca=/nowhere.pem", "ca"),
    ],
)
def test_what_is_wrong_is_named(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _of(url)


@pytest.mark.parametrize(
    "url", ["redis://u:hunter2@h?color=red", "redis://h?password=hunter2", "redis://u:hunter2@h:x", "redis://u:hunter2@h/x"]
)
def test_no_error_quotes_a_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _of(url)
    assert "hunter2" not in str(caught.value)


def test_no_form_of_the_settings_shows_a_secret() -> None:
    settings = _of("redis://alice:hunter2@h")
    assert "hunter2" not in f"{settings} {settings!r} {[settings]}"
    assert "alice" not in f"{settings} {settings!r}"


def test_without_redis_py_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['redis'] = None\n"
        "from asynccache.errors import ConfigError\n"
        "from asynccache.storage.attachment import backend_class\n"
        "try: backend_class('redis')\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert f"redis-py: {install('redis')}" in done.stdout
    assert "pip install 'redis" in done.stdout
