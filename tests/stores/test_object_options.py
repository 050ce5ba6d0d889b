"""Object store URLs: what is allowed, what is refused, and that no secret is ever shown."""

from __future__ import annotations

import sys

import pytest
from asynccache_backends.object_store import ObjectBackend
from asynccache_backends.object_store.client import connect, redacted, settings_of

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import parse_url
from asynccache.testing.backend_suite import LAYOUT
from tests.stores.server import free_port

SECRET = "hunter2hunter2"


@pytest.mark.parametrize("option", [
    f"access_key_id={SECRET}", f"secret_access_key={SECRET}", f"session_token={SECRET}", f"sas={SECRET}",
    f"account_key={SECRET}", f"password={SECRET}", f"endpoint=http://user:{SECRET}@127.0.0.1:9",
])
def test_secrets_in_a_url_are_refused_and_not_repeated(option: str) -> None:
    with pytest.raises(ConfigError, match="environment") as refused:
        settings_of(parse_url(f"s3://bucket/kv?{option}"))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(("url", "match"), [
    ("s3://bucket?colour=red", "unknown option 'colour'"),
    ("gs://bucket?region=us-east-1", "unknown option 'region'"),
    ("s3://bucket?pack=1", "pack=1 must lie between"),
    ("s3://bucket?pack=1TiB", "must lie between"),
    ("s3://bucket?capacity=5GiB", "there is no capacity: a lifetime rule of the bucket"),
    ("s3://bucket?refresh=often", "refresh='often'"),
    ("s3://bucket?refresh=nan", "refresh=nan"),
    ("s3://bucket?refresh=-1", "refresh=-1"),
    ("s3://bucket?parallel=0", "parallel=0"),
    ("s3://bucket?request_timeout=0", "request_timeout=0"),
    ("s3://bucket?request_timeout=1e300", "request_timeout=1e"),
])
def test_options_that_are_refused(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        settings_of(parse_url(url))


@pytest.mark.parametrize(("url", "match"), [
    ("s3://", "no bucket"), ("gs:///prefix", "no bucket"), ("s3://b/a//c", "empty part"),
    ("s3://b/../c", r"'\.\.'"), ("s3://b/./c", r"'\.'"),
])
def test_places_that_are_refused(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        connect(parse_url(url), settings_of(parse_url(url)))


@pytest.mark.parametrize("place", [
    f"user:{SECRET}@bucket/kv", f"user:{SECRET}/more@bucket", f"bucket/user:{SECRET}@host/..",
])
def test_a_user_and_password_before_the_bucket_are_refused_and_not_repeated(place: str) -> None:
    url = parse_url(f"s3://{place}")
    with pytest.raises(ConfigError, match=r"bucket|prefix") as refused:
        connect(url, settings_of(url))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", [
    "s3://bucket/a/b?region=eu-west-1", "s3://bucket?endpoint=http://127.0.0.1:9000", "gs://bucket/a",
    "az://container/a?account=name", "s3://bucket/a/",
])
def test_places_that_are_understood(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    client = connect(parse_url(url), settings_of(parse_url(url)))
    assert url.partition("?")[0].replace("//", "") == client.shown
    assert SECRET not in repr(client)


def test_queries_and_long_texts_are_cut_from_messages() -> None:
    text = redacted(ValueError(f"GET https://x.blob/c?sig={SECRET}&se=1 failed\nheaders: {SECRET}" + "x" * 999))
    assert text == "ValueError: GET https://x.blob/c?... failed"


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'obstore>=0\.6'"):
        connect(parse_url("s3://bucket"), settings_of(parse_url("s3://bucket")))


async def test_a_store_that_is_not_there_is_unavailable_soon_and_keeps_its_secrets(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRET)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    url = parse_url(f"s3://bucket/kv?endpoint=http://127.0.0.1:{free_port()}&request_timeout=2")
    with pytest.raises(Unavailable, match="s3:bucket/kv") as failed:
        await ObjectBackend.open(url, LAYOUT)
    assert SECRET not in str(failed.value)
