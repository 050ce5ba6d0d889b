"""The meanings of the client's numbers, number by number."""

from __future__ import annotations

import pytest
from asynccache_backends.mooncake import codes

from asynccache.errors import Timeout, Unavailable
from asynccache.storage import Result

MISS, HIT, CORRUPT, FAILED = Result


@pytest.mark.parametrize(
    ("code", "put", "get", "delete"),
    [
        (0, HIT, CORRUPT, HIT),                    # a get of no bytes at all is not the page
        (-1, FAILED, FAILED, FAILED),
        (-101, FAILED, FAILED, FAILED),
        (-200, FAILED, FAILED, FAILED),
        (-600, FAILED, FAILED, FAILED),
        (-703, FAILED, MISS, MISS),
        (-704, FAILED, MISS, MISS),
        (-705, HIT, FAILED, FAILED),
        (-706, FAILED, FAILED, FAILED),            # removal is forced, so a lease that still stands in its way is news
        (-707, FAILED, FAILED, FAILED),
        (-712, FAILED, MISS, MISS),
        (-800, FAILED, FAILED, FAILED),
        (-900, FAILED, FAILED, FAILED),
        (-901, FAILED, FAILED, FAILED),
        (-12345, FAILED, FAILED, FAILED),
    ],
)  # fmt: skip
def test_each_code_has_a_meaning(code: int, put: Result, get: Result, delete: Result) -> None:
    assert codes.put_result(code) is put
    assert codes.get_result(code, 1064) is get
    assert codes.delete_result(code) is delete


@pytest.mark.parametrize(("written", "result"), [(1064, HIT), (1063, CORRUPT), (1065, CORRUPT)])
def test_a_get_is_a_hit_only_to_the_byte(written: int, result: Result) -> None:
    assert codes.get_result(written, 1064) is result


@pytest.mark.parametrize(("code", "result"), [(1, HIT), (0, MISS), (-1, FAILED), (-901, FAILED)])
def test_presence(code: int, result: Result) -> None:
    assert codes.exists_result(code) is result


def test_a_call_reached_nobody_if_no_key_of_it_did() -> None:
    assert codes.is_nobody([-800, -900, -901, codes.NOT_TRIED])
    assert not codes.is_nobody([-800, -704])
    assert not codes.is_nobody([-800, 0])
    assert not codes.is_nobody([])


def test_a_transfer_that_fails_does_not_mean_that_the_master_is_lost() -> None:
    assert codes.lost_master([0, -900])
    assert codes.lost_master([-901])
    assert not codes.lost_master([-800, -200, 0])


def test_the_error_says_who_does_not_answer() -> None:
    assert isinstance(codes.nobody_error([-900, -901], "m:1"), Timeout)
    assert isinstance(codes.nobody_error([-900], "m:1"), Unavailable)
    assert "m:1" in str(codes.nobody_error([-900], "m:1"))
    assert "owners" in str(codes.nobody_error([-800], "m:1"))
