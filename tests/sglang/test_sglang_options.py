"""The extra config: every name and value is checked, and URLs have this rank's numbers."""

from __future__ import annotations

from typing import Any

import pytest
from asynccache_sglang.options import OF_SGLANG, SglangOptions, placed, resolve

from asynccache import ConfigError

NAMED: dict[str, Any] = {"backend_name": "asynccache", "module_path": "asynccache_sglang.storage",
                         "class_name": "AsyncCacheStorage", "interface_v1": 1}  # fmt: skip


def test_what_sglang_itself_reads_is_no_option_of_ours() -> None:
    given = dict.fromkeys(OF_SGLANG, "x") | {"interface_v1": 1, "storage": "memory:"}
    assert resolve(given) == SglangOptions(("memory:",))


def test_all_options() -> None:
    given = {
        "storage": ["memory:", "file:/var/kv"], "namespace": "7b 2026-11", "model": "/models/7b", "timeout": 2,
        "lookup_timeout": 0.5, "staging": "64MiB", "store_options": {"concurrency": 4},
        "compatible_with": "0.5.23",
    }  # fmt: skip
    assert resolve(NAMED | given) == SglangOptions(
        ("memory:", "file:/var/kv"), "7b 2026-11", "/models/7b", 2.0, 0.5, 64 << 20, {"concurrency": "4"}, "0.5.23"
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"storge": "memory:"}, "there is no option 'storge'; there are storage,"),
        ({"storage": "memory:", "timout": 1}, "there is no option 'timout'; there are storage,"),
        ({}, "storage=None must be the URL of a store"),
        ({"storage": []}, r"storage=\[\] must be the URL"),
        ({"storage": ["memory:", 7]}, "storage=.* must be the URL"),
        ({"storage": "memory:", "namespace": ""}, "namespace='' must not be empty"),
        ({"storage": "memory:", "namespace": 7}, "namespace=7 must be text"),
        ({"storage": "memory:", "compatible_with": 5}, "compatible_with=5 must be text"),
        ({"storage": "memory:", "compatible_with": "sglang"}, "compatible_with='sglang' must be a version"),
        ({"storage": "memory:", "model": 7}, "model=7 must be text"),
        ({"storage": "memory:", "timeout": 0}, "timeout=0 must be above 0"),
        ({"storage": "memory:", "timeout": "1"}, "timeout='1' must be a number"),
        ({"storage": "memory:", "lookup_timeout": -1}, "lookup_timeout=-1 must be above 0"),
        ({"storage": "memory:", "staging": 0}, "staging=0 must be at least 1"),
        ({"storage": "memory:", "staging": "much"}, "staging='much' is no size"),
        ({"storage": "memory:", "interface_v1": 0}, 'set "interface_v1": 1'),
        ({"storage": "memory:", "store_options": {"a": True}}, "store_options: 'a' must be text or a number"),
    ],
)
def test_what_is_wrong_is_refused_by_name_and_value(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(NAMED | given)


def test_an_error_does_not_show_a_password() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(NAMED | {"storage": ["redis://user:hunter2@host", 7]})
    assert "hunter2" not in str(caught.value)


def test_a_url_has_the_numbers_of_this_rank() -> None:
    ranks = {"tp_rank": 3, "pp_rank": 1, "dp_rank": 0, "cp_rank": 2}
    urls = ("file:/kv/{tp_rank}-{pp_rank}-{dp_rank}-{cp_rank}", "redis://host?prefix={other}")
    assert placed(urls, ranks, replicated=False) == ("file:/kv/3-1-0-2", "redis://host?prefix={other}")


def test_a_store_by_rank_is_refused_where_one_rank_writes_for_all() -> None:
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "dp_rank", "cp_rank"), 0)
    assert placed(("file:/kv/{pp_rank}",), ranks, replicated=True) == ("file:/kv/0",)
    with pytest.raises(ConfigError, match="name a store that all ranks share"):
        placed(("file:/kv/{tp_rank}",), ranks, replicated=True)
