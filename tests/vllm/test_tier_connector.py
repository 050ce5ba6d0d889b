"""The tier as vLLM's real connector builds it, from a real configuration of the engine: its namespace. No engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.spec", reason="vLLM is not installed: make test-vllm")

import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from asynccache.errors import ConfigError
from asynccache.storage import Result
from tests.docs.docs_kit import all_blocks

SHM = Path("/dev/shm")
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16,
    "max_position_embeddings": 512, "torch_dtype": "float32",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, as far as nobody loads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@contextmanager
def built(
    model: Path, store: Path, entry: dict[str, Any] | None = None, *, layout: str | None = "LBHNC", head: int = 16,
    **engine: Any,
) -> Iterator[Any]:  # fmt: skip
    """The tier that vLLM's connector builds for such an engine, with what the manual says. ``layout``: of its blocks;
    ``head``: the size of a head there."""
    tier = {"type": "asynccache", "storage": f"file:{store}/kv?capacity=1GiB", **(entry or {})}
    said = json.loads(next(block.code for block in all_blocks("json") if block.page == "docs/engines/vllm.md"))
    said["kv_connector_extra_config"].update({"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]})
    transfer = KVTransferConfig(**said)
    given = {"dtype": "float32", "block_size": 32, "enforce_eager": True, "skip_tokenizer_init": True, **engine}
    config = EngineArgs(model=str(model), kv_transfer_config=transfer, **given).create_engine_config()
    config.cache_config.kv_cache_layout = layout  # which the engine's core says, once there are layers
    size = config.cache_config.block_size
    layers = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=head, dtype=config.model_config.dtype)
    groups = [KVCacheGroupSpec(["layers.0", "layers.1"], layers)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    try:
        yield connector.connector_scheduler.manager.secondary_tiers[0]
    finally:
        connector.shutdown()


def store(model: Path, folder: Path, entry: dict[str, Any] | None = None, **engine: Any) -> str:
    """Such an engine stores a chunk. Returns its namespace."""
    with built(model, folder, entry, **engine) as tier:
        assert tier._pages.put([b"chunk"], [0]).result(10) == [Result.HIT]
        namespace: str = tier.namespace
        return namespace


def finds(model: Path, folder: Path, entry: dict[str, Any] | None = None, **engine: Any) -> bool:
    with built(model, folder, entry, **engine) as tier:
        return bool(tier._pages.exists([b"chunk"]).result(10) == [Result.HIT])


def test_an_engine_with_the_same_weights_anywhere_finds_what_was_stored(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path)
    copy = shutil.copytree(model, tmp_path / "copy")
    assert finds(copy, tmp_path)


OTHERS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "bfloat16"},
    "position encoding": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}},
    "hashes": {"prefix_caching_hash_algo": "sha256_cbor"},
}


@pytest.mark.parametrize("what", OTHERS)
def test_an_engine_that_computes_otherwise_finds_nothing(model: Path, tmp_path: Path, what: str) -> None:
    store(model, tmp_path)
    assert not finds(model, tmp_path, **OTHERS[what])


ELSEWHERE: dict[str, dict[str, Any]] = {
    "another order of a block": {"layout": "LBNHC"},
    "an order that is not said": {"layout": None},
    "a block of another length": {"block_size": 64},
    "another dtype": {"dtype": "bfloat16"},
}


def test_a_version_that_cannot_change_the_bytes_finds_what_another_one_stored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store(model, tmp_path)
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    assert finds(model, tmp_path)
    assert store(model, tmp_path) == stored
    assert "0.99" not in stored
    for what, changed in ELSEWHERE.items():
        assert not finds(model, tmp_path, **changed), what


UNKNOWN: dict[str, dict[str, Any]] = {
    "an order that is not said": {"layout": None},
    "blocks with something beside K and V": {"head": 24},
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_version_that_may_change_the_bytes_finds_nothing_unless_the_user_says_that_it_does_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store(model, tmp_path, **UNKNOWN[what])
    ours = vllm.__version__
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    for said, found in ((None, False), ("0.98.0", False), (ours, True)):
        assert finds(model, tmp_path, {"compatible_with": said}, **UNKNOWN[what]) is found, said


def test_other_weights_under_the_same_name_find_nothing(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path)
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert not finds(model, tmp_path)


def test_the_users_namespace_is_enough_and_must_change_with_the_weights(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path, {"namespace": "v1"}, load_format="dummy")
    assert not finds(model, tmp_path, {"namespace": "v2"}, load_format="dummy")
    assert finds(model, tmp_path, {"namespace": "v1"}, load_format="dummy")


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"enable_lora": True}, "LoRA adapter by its name and path only"),
    ],
)
def test_weights_that_nobody_can_know_are_refused_and_nothing_is_left(
    model: Path, tmp_path: Path, engine: dict[str, Any], why: str
) -> None:
    before = set(SHM.glob("vllm_offload_*"))
    with pytest.raises(ConfigError, match="namespace: ") as refused, built(model, tmp_path, **engine):
        pass
    assert why in str(refused.value)
    assert set(SHM.glob("vllm_offload_*")) <= before
    assert not (tmp_path / "kv").exists()


def test_keys_that_no_other_process_has_are_told(
    model: Path, tmp_path: Path, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with built(model, tmp_path):
        assert "gives chunks different keys in each process" not in told.text
    with built(model, tmp_path, prefix_caching_hash_algo="xxhash"):
        assert "prefix_caching_hash_algo='xxhash' gives chunks different keys in each process" in told.text
