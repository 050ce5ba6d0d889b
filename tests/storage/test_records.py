"""Headers, keys and digests."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.storage import PageKey, Record
from asynccache.storage.checked import header_of, pool_digest, seal, storage_key, store_layout, verify
from asynccache.testing.backend_suite import aligned, page_key

SPEC = PoolSpec(
    name="full", component=ComponentKind.FULL, bytes_per_page=4096, layers=4, device_pages=8, host_pages=8,
    hit_policy=HitPolicy.ALL_PAGES,
)


def sealed() -> tuple[PageKey, Record]:
    key, record = page_key("k"), Record(aligned(64), aligned(4096))
    record.payload[:] = bytes(range(256)) * 16
    seal([key], [record])
    return key, record


def test_a_sealed_record_verifies() -> None:
    key, record = sealed()
    assert verify([key], [record]) == [True]
    assert bytes(record.header[:4]) == b"acKV"
    assert bytes(record.header[16:48]) == key.key


@pytest.mark.parametrize("bit", range(0, 64 * 8, 7))
def test_any_flipped_bit_of_the_header_shows(bit: int) -> None:
    key, record = sealed()
    record.header[bit // 8] ^= 1 << bit % 8
    assert verify([key], [record]) == [False]


@pytest.mark.parametrize("byte", [0, 1, 2047, 4095])
def test_any_flipped_bit_of_the_payload_shows(byte: int) -> None:
    key, record = sealed()
    record.payload[byte] ^= 0x80
    assert verify([key], [record]) == [False]


def test_a_record_of_another_key_or_length_does_not_verify() -> None:
    key, record = sealed()
    assert verify([page_key("other")], [record]) == [False]
    assert verify([key], [Record(record.header, record.payload[:2048])]) == [False]


def test_an_empty_header_does_not_verify_an_empty_page() -> None:
    assert verify([page_key("k")], [Record(aligned(64), aligned(4096))]) == [False]


def test_the_header_is_64_bytes_and_a_function_of_key_and_payload() -> None:
    assert len(header_of(bytes(32), aligned(10))) == 64
    assert header_of(bytes(32), aligned(10)) != header_of(bytes(32), aligned(11))


def test_a_storage_key_is_made_of_the_hash_of_hash_and_digest_and_names_the_block() -> None:
    digest, page = sha256(bytes(range(32)) + b"d" * 32).digest(), bytes(range(32))
    assert storage_key(page, b"d" * 32) == digest[:23] + b"\1" + page[24:]
    assert storage_key(page, b"d" * 32, named=False) == digest[:23] + b"\0" + digest[24:]


@pytest.mark.parametrize(
    "other",
    [{"name": "swa"}, {"dtype": "bfloat16"}, {"bytes_per_page": 8192}, {"layers": 8}],
    ids=lambda change: next(iter(change)),
)
def test_the_digest_changes_with_all_that_changes_the_bytes(other: dict[str, str | int]) -> None:
    assert pool_digest(replace(SPEC, **other), 16) != pool_digest(SPEC, 16)  # type: ignore[arg-type]


def test_the_digest_changes_with_page_size_layout_layers_and_shard() -> None:
    digests = {
        pool_digest(SPEC, 16), pool_digest(SPEC, 32), pool_digest(SPEC, 16, layout="layer_first"),
        pool_digest(replace(SPEC, covers=tuple(range(4, 4 + SPEC.layers))), 16), pool_digest(SPEC, 16, shard="tp 0/2"),
        pool_digest(SPEC, 16, shard="tp 1/2"),
    }
    assert len(digests) == 6


def test_the_digest_does_not_depend_on_how_many_pages_there_are() -> None:
    assert pool_digest(replace(SPEC, device_pages=1, host_pages=99), 16) == pool_digest(SPEC, 16)


def test_fields_of_a_digest_do_not_run_into_each_other() -> None:
    a, b = replace(SPEC, name="ab", dtype="c"), replace(SPEC, name="a", dtype="bc")
    assert pool_digest(a, 16) != pool_digest(b, 16)


def test_logical_pools_have_no_stored_object() -> None:
    assert store_layout([SPEC, replace(SPEC, name="anchor", bytes_per_page=0)]).page_bytes == {"full": 4096}
