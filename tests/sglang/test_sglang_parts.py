"""Parts of the backend without SGLang: its options, whose pages a process finds, which prefixes can be restored, and
the names of blocks."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from asynccache_sglang import identity
from asynccache_sglang.hits import PoolPresence, RestorablePages, fold, leading
from asynccache_sglang.identity import PageMake, ServerOptions
from asynccache_sglang.options import OF_SGLANG, SglangOptions, placed, resolve

from asynccache import ConfigError

# The extra config: every name and value is checked, and URLs have this rank's numbers.


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


# A stored page is found by processes that would have stored the same bytes, and by no others.


SERVER = ServerOptions("0.5.23", model_path="some/model", load_format="auto", kv_cache_dtype="auto")


class Shard(NamedTuple):
    """As much of SGLang's configuration of a storage as says which part of the KV a process has."""

    tp_rank: int = 0
    tp_size: int = 2
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False


SHARD = Shard()
KIND = PageMake("page_first parts", ("dtype torch.bfloat16",), 64, (4096, 4096), sharded=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "digest 0"}, {"model_name": "other"},
        {"server": SERVER._replace(quantization="fp8")}, {"server": SERVER._replace(kv_cache_dtype="fp8_e5m2")},
        {"server": SERVER._replace(json_model_override_args='{"rope_theta": 5e5}')},
        {"server": SERVER._replace(device="hip (9, 4)")},
        {"server": SERVER._replace(quantization_param_path="scales.json")},
        {"server": SERVER._replace(dtype="float16")}, {"server": SERVER._replace(model_impl="transformers")},
        {"shard": SHARD._replace(pp_rank=1)}, {"shard": SHARD._replace(pp_size=2)},
        {"shard": SHARD._replace(attn_cp_rank=1)}, {"shard": SHARD._replace(attn_cp_size=2)},
        {"shard": SHARD._replace(dcp_rank=1)}, {"shard": SHARD._replace(dcp_size=2)},
        {"shard": SHARD._replace(is_mla_model=True)},
    ],
)  # fmt: skip
def test_whatever_changes_the_pages_changes_the_namespace(changed: dict[str, object]) -> None:
    base: dict[str, object] = {"weights": "digest 1", "model_name": "model", "server": SERVER, "shard": SHARD}
    assert identity.namespace(**{**base, **changed}) != identity.namespace(**base)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "server",
    [SERVER._replace(model_path="/elsewhere"), SERVER._replace(revision="v2"), SERVER._replace(load_format="pt"),
     SERVER._replace(sglang="0.5.24")],
)
def test_where_the_weights_lie_and_a_version_do_not(server: ServerOptions) -> None:
    made = [identity.namespace("digest 1", "model", one, SHARD) for one in (server, SERVER)]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "kind",
    [
        KIND._replace(layout="layer_first parts"), KIND._replace(dtypes=("dtype torch.float16",)),
        KIND._replace(page_size=32), KIND._replace(parts=(2048, 6144)), KIND._replace(sharded=False),
        KIND._replace(sglang="0.5.23"),
    ],
)  # fmt: skip
def test_whatever_changes_a_pools_pages_changes_its_keys(kind: PageMake) -> None:
    assert identity.suffix(kind, SHARD) != identity.suffix(KIND, SHARD)


def test_ranks_have_pages_of_their_own_unless_one_writes_for_all() -> None:
    others = [SHARD._replace(tp_rank=1), SHARD._replace(tp_size=4)]
    assert all(identity.suffix(KIND, other) != identity.suffix(KIND, SHARD) for other in others)
    shared = KIND._replace(sharded=False)
    assert all(identity.suffix(shared, other) == identity.suffix(shared, SHARD) for other in others)


def test_keys_of_two_pools_are_never_the_same() -> None:
    behind = identity.suffix(KIND, SHARD)
    assert len(behind) == identity.SUFFIX_BYTES
    assert identity.page_keys(["ab", "cd"], behind) == [b"ab" + behind, b"cd" + behind]


def test_the_users_namespace_stands_for_the_weights() -> None:
    assert identity.weights(SglangOptions(("memory:",), namespace="v1"), SERVER) == "namespace v1"


def test_weights_are_known_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    server = SERVER._replace(model_path=str(tmp_path))
    before = identity.weights(SglangOptions(("memory:",)), server)
    assert identity.weights(SglangOptions(("memory:",), model=str(tmp_path)), SERVER) == before
    (tmp_path / "a.safetensors").write_bytes(b"other weights")
    assert identity.weights(SglangOptions(("memory:",)), server) != before


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (SERVER._replace(model_path=None), "the server's model path is not known"),
        (SERVER._replace(load_format="dummy"), "--load-format dummy"),
        (SERVER._replace(load_format="remote_instance"), "--load-format remote_instance"),
        (SERVER._replace(lora=True), "name a LoRA adapter by its name and path only"),
        (SERVER._replace(model_path="/nowhere"), "its weights cannot be read"),
    ],
)
def test_where_neither_can_be_had_it_is_refused_in_a_sentence(server: ServerOptions, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        identity.weights(SglangOptions(("memory:",)), server)
    assert '"namespace" to a text that you change whenever the weights change' in str(caught.value)


def mha_pool(**changed: object) -> object:
    """What a host pool of K and V says about itself."""
    rows = SimpleNamespace(scales=None, buffers=SimpleNamespace(layout=SimpleNamespace(value="nhd")))
    said = {"storage_format_tag": None, "_buffer_infos": (rows,), "head_group_num": 1}
    return type("MHATokenToKVPoolHost", (), said | changed)()


def mla_pool(**changed: object) -> object:
    said = {"storage_format_tag": None, "dsa_kv_cache_store_fp8": False, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "kv_cache_dim": 576, "layer_num": 2, "target_layer_num": 2}  # fmt: skip
    return type("MLATokenToKVPoolHost", (), said | changed)()


def test_the_order_of_plain_pages_is_known() -> None:
    for dtype in (None, "auto", "bfloat16", "fp8_e4m3"):
        assert identity.order_is_known(mha_pool(), dtype)
        assert identity.order_is_known(mla_pool(), dtype)


HND = SimpleNamespace(scales=None, buffers=SimpleNamespace(layout=SimpleNamespace(value="hnd")))
SCALED = SimpleNamespace(scales=object(), buffers=SimpleNamespace(layout=SimpleNamespace(value="nhd")))


@pytest.mark.parametrize(
    "pool",
    [
        object(), mha_pool(_buffer_infos=(HND,)), mha_pool(_buffer_infos=(SCALED,)), mha_pool(_buffer_infos=()),
        mha_pool(_buffer_infos=(HND, HND)), mha_pool(head_group_num=2), mha_pool(storage_format_tag="envelopes"),
        mla_pool(dsa_kv_cache_store_fp8=True), mla_pool(kv_cache_dim=656), mla_pool(layer_num=3),
        mla_pool(storage_format_tag="envelopes"), type("MambaPoolHost", (), {"storage_format_tag": None})(),
        type("MHATokenToKVPoolHost", (), {})(), type("MLATokenToKVPoolHost", (), {"storage_format_tag": None})(),
    ],
)  # fmt: skip
def test_the_order_of_other_pages_is_not(pool: object) -> None:
    assert not identity.order_is_known(pool, "auto")


def test_codes_are_no_values() -> None:
    assert not identity.order_is_known(mha_pool(), "fp4_e2m1")


def test_the_order_of_rows_on_the_device_is_told() -> None:
    assert [identity.rows_of(pool) for pool in (mha_pool(), mha_pool(_buffer_infos=(HND,)), object())] == [
        "nhd", "hnd", None]


# Which prefixes can be restored, against a count that looks at every prefix.


def test_leading_stops_at_the_first_that_is_not_there() -> None:
    assert [leading(there) for there in ([], [False, True], [True, True, False, True], [True, True])] == [0, 0, 2, 2]


@pytest.mark.parametrize(("kv", "asked", "expected"), [
    ([True, True, False, True], [], RestorablePages(2, {"kv": 2}, [1, 2])),
    ([False, True], [PoolPresence("swa", [True, True], 1)], RestorablePages(0, {}, [])),
    ([True] * 4, [PoolPresence("indexer", [True, True, False, True])],
     RestorablePages(2, {"kv": 4, "indexer": 2}, [1, 2])),
    ([True] * 5, [PoolPresence("mamba", [True, False, False, False, True], 1)],
     RestorablePages(5, {"kv": 5, "mamba": 5}, [1, 5])),
    ([True] * 3, [PoolPresence("swa", [False, False, True], 1), PoolPresence("mamba", [False, True, False], 1)],
     RestorablePages(0, {"kv": 3, "swa": 3, "mamba": 2}, [])),
    ([True] * 2, [PoolPresence("swa", [True] * 2, 3)], RestorablePages(2, {"kv": 2, "swa": 2}, [1, 2])),
], ids=["kv alone", "no first page", "all pages", "five and not four", "nothing in common", "no window"])  # fmt: skip
def test_what_is_told_of_each_pool(kv: list[bool], asked: list[PoolPresence], expected: RestorablePages) -> None:
    assert fold("kv", kv, asked) == expected


def test_any_pools_at_all() -> None:
    random = Random(5)
    for _ in range(2000):
        pages = random.randrange(9)
        there = [[random.random() < 0.7 for _ in range(pages)] for _ in range(3)]
        windows = [random.choice((None, 1, 2, 3)) for _ in range(2)]
        asked = [PoolPresence(f"pool {at}", there[at + 1], window) for at, window in enumerate(windows)]
        expected = [
            length for length in range(1, pages + 1)
            if all(there[0][:length])
            and all(all(one.there[0 if one.window is None else max(0, length - one.window) : length]) for one in asked)
        ]  # fmt: skip
        hits = fold("kv", there[0], asked)
        assert (hits.restorable, hits.pages) == (expected, max(expected, default=0))


# What SGLang's events call a block is in our storage keys: SGLang's own function says it.


def test_a_block_is_named_by_the_first_64_bits_of_its_hash_as_a_signed_number() -> None:
    behind = bytes(identity.SUFFIX_BYTES)
    names = []
    for number in range(20):
        text = sha256(b"%d" % number).hexdigest()
        [key] = identity.page_keys([text], behind)
        name = identity.block_named("kv", key)
        assert name is not None
        assert name % (1 << 64) == int(text[:16], 16)
        assert -(1 << 63) <= name < 1 << 63
        names.append(name)
        assert identity.block_named("mamba", key) is None
    assert min(names) < 0 < max(names)
    assert identity.block_named("kv", b"no hash" + behind) is None


def test_sglang_says_the_same() -> None:
    utils = pytest.importorskip("sglang.srt.mem_cache.utils")
    hicache = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
    assert hicache.PoolName.KV.value == identity.NAMED_POOL
    for number in range(20):
        text = sha256(b"%d" % number).hexdigest()
        [key] = identity.page_keys([text], bytes(identity.SUFFIX_BYTES))
        assert identity.block_named("kv", key) == utils.hash_str_to_int64(text)
