"""The options that every store URL may have, whatever its scheme."""

from __future__ import annotations

import pytest

from asynccache.errors import ConfigError
from asynccache.storage.url import StoreOptions, parse_url, take_options


def test_all_of_them_are_taken_out_and_the_rest_is_left_to_the_backend() -> None:
    url = parse_url("file:/kv?name=disk&write=no&promote=no&timeout=2.5&concurrency=4&slow=0.5&capacity=1GiB")
    options, rest = take_options(url)
    assert options == StoreOptions("disk", write=False, promote=False, timeout=2.5, concurrency=4, slow=0.5)
    assert str(rest) == "file:/kv?capacity=1GiB"


def test_without_any_the_scheme_is_the_name() -> None:
    options, rest = take_options(parse_url("memory:"))
    assert options == StoreOptions("memory")
    assert options.write
    assert options.promote
    assert rest == parse_url("memory:")


@pytest.mark.parametrize(
    "option",
    ["name=", "name=a/b", "name=..", "write=maybe", "promote=2", "timeout=0", "timeout=nan", "timeout=inf", "slow=-1",
     "timeout=soon", "concurrency=0", "concurrency=1.5", "concurrency=-1", "concurrency=²"],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=option.split("=", maxsplit=1)[0]):
        take_options(parse_url(f"memory:?{option}"))
