"""A stored page is found by processes that would have stored the same bytes, and by no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from asynccache_sglang import identity
from asynccache_sglang.identity import PageMake, ServerOptions
from asynccache_sglang.options import SglangOptions

from asynccache import ConfigError

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
