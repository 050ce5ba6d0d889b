"""The tier's entry in ``secondary_tiers``: what it may have, and how all else is refused. Without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from asynccache_vllm.options import LOOKUP_TIMEOUT, TierOptions

from asynccache.errors import ConfigError


def test_one_url_is_enough() -> None:
    options = TierOptions.parse({"storage": "memory:"})
    assert options == TierOptions(storage=("memory:",))
    assert options.lookup_timeout == LOOKUP_TIMEOUT == 0.5
    assert options.namespace is None


def test_all_that_can_be_said() -> None:
    options = TierOptions.parse({
        "storage": ["memory:?capacity=1GiB", "redis://cache:6379"], "namespace": "tiny 3", "lookup_timeout": 2,
        "store_options": {"timeout": 2.5, "slow": 1, "write": "no"}, "enable_kv_events": True, "locality": "REMOTE",
        "compatible_with": "0.32.0+cu130",
    })  # fmt: skip
    assert options.storage == ("memory:?capacity=1GiB", "redis://cache:6379")
    assert options.namespace == "tiny 3"
    assert options.lookup_timeout == 2.0
    assert options.store_options == {"timeout": "2.5", "slow": "1", "write": "no"}
    assert options.enable_kv_events
    assert options.compatible_with == "0.32.0+cu130"
    assert options.locality == "REMOTE"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "storage: no store is named"),
        ({"storage": []}, "storage: no store is named"),
        ({"storage": ""}, "storage='' must not be empty"),
        ({"storage": 7}, "storage=7 must be text"),
        ({"storage": ["memory:", None]}, "storage=None must be text"),
        ({"storage": "memory:", "namespace": ""}, "namespace='' must not be empty"),
        ({"storage": "memory:", "namespace": 3}, "namespace=3 must be text"),
        ({"storage": "memory:", "lookup_timeout": 0}, "lookup_timeout=0 must be above 0"),
        ({"storage": "memory:", "lookup_timeout": "1"}, "lookup_timeout='1' must be a number"),
        ({"storage": "memory:", "lookup_timeout": float("inf")}, "lookup_timeout=inf must be a finite number"),
        ({"storage": "memory:", "store_options": ["timeout"]}, "store_options must map names"),
        ({"storage": "memory:", "store_options": {"timeout": True}}, "store_options: 'timeout' must be text or a"),
        ({"storage": "memory:", "enable_kv_events": 1}, "enable_kv_events=1 must be True or False"),
        ({"storage": "memory:", "compatible_with": 0.32}, "compatible_with=0.32 must be text"),
        ({"storage": "memory:", "compatible_with": ["0.32.0"]}, "compatible_with=['0.32.0'] must be text"),
        ({"storage": "memory:", "compatible_with": ""}, "compatible_with='' must be a version, as in '0.32.0'"),
        ({"storage": "memory:", "compatible_with": "vllm 0.32"}, "compatible_with='vllm 0.32' must be a version"),
        ({"storage": "memory:", "compatible_with": "0" * 65}, "must be a version"),
        ({"storage": "memory:", "locality": "near"}, "locality='near' must be one of LOCAL, REMOTE"),
        ({"storage": "memory:", "root_dir": "/kv"}, "unknown key 'root_dir'; there are compatible_with, "),
    ],
)
def test_what_is_unusable_is_refused_by_name_and_value(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TierOptions.parse(given)
    assert said in str(refused.value)
