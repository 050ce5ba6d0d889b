"""What a model has: its components, layers, names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asynccache_hf
import pytest
import torch
import transformers
from asynccache_hf import describe
from asynccache_hf.call import cache_name
from asynccache_hf.trial import MORE
from packaging.requirements import Requirement
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from asynccache import CacheConfig, Full, SlidingWindow, components_from
from asynccache.core.settings import HitPolicy
from asynccache.errors import ConfigError
from tests.engine.engine_kit import layout_of, model_of
from tests.engine.engine_models import WINDOW, make

# ``describe``: what is found in a model's cache, and what is refused.


def config(family: str, page_size: int) -> CacheConfig:
    return layout_of(family, page_size).cache_config(device_tokens=256, host_tokens=256)


def test_deepseek_v4_in_pages_that_its_rates_divide() -> None:
    """FULL is logical; entries take FULL's slots and are needed everywhere, states the window's, where it ends."""
    settings = config("deepseek_v4", 16)
    assert settings.components[0].bytes_per_token == 0  # type: ignore[union-attr]
    policies = {s.name: (s.indices_from, s.hit_policy) for s in settings.sidecars}
    assert policies == {
        "c16": ("full", HitPolicy.ALL_PAGES),
        "c4": ("full", HitPolicy.ALL_PAGES),
        "c4_indexer": ("full", HitPolicy.ALL_PAGES),
        "c4_state": ("swa", HitPolicy.TRAILING_PAGES),
        "c4_indexer_state": ("swa", HitPolicy.TRAILING_PAGES),
    }


def test_a_state_between_pages_is_a_pool_where_a_page_is_smaller_than_the_rate() -> None:
    assert "c16_state" in {s.name for s in config("deepseek_v4", 8).sidecars}
    assert "c16_state" not in {s.name for s in config("deepseek_v4", 32).sidecars}


@pytest.mark.parametrize(("page_size", "rate"), [(6, 16), (12, 16), (24, 16), (3, 16)])
def test_a_page_size_that_does_not_fit_the_rates_is_refused(page_size: int, rate: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size={page_size} is neither a multiple nor a divisor .* {rate}"):
        describe(model_of("deepseek_v4"), page_size)


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1"])
def test_the_name_follows_weights_and_configuration(family: str) -> None:
    name = layout_of(family).model
    assert describe(make(family), 8).model == name
    assert describe(make(family, seed=1), 8).model != name
    assert describe(make(family, initializer_range=0.1), 8).model != name


def test_windows_come_from_the_cache_classes() -> None:
    assert layout_of("gemma3").window == layout_of("deepseek_v4").window == WINDOW
    assert layout_of("qwen3").window == 0


def test_states_of_different_dtypes_share_a_slot() -> None:
    """The trial has put them back: in half precision the recurrent state stays float32 and the convolution's is not."""
    layout = describe(make("falcon_h1").to(torch.bfloat16), 8)
    assert {pool.name: pool.dtype for pool in layout.pools} == {"mamba": "bfloat16+float32", "full": "bfloat16"}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "lfm2", "nemotron_h"])
def test_only_the_logits_that_are_compared_are_computed(family: str) -> None:
    """Those of a whole window are GiB: 4096 tokens of a vocabulary of 256000."""
    model, size, rows = make(family), 4, []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    try:
        describe(model, size, name=family)
    finally:
        hook.remove()
    most = size + MORE  # of each request, a page and what follows the last one
    assert max(rows) == (2 * most if family in ("llama", "gpt_oss") else most + 1)


# refusals


class OddLayer(DynamicLayer):  # type: ignore[misc]
    pass


class MoreLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """It keeps something beside its window."""

    def __init__(self, sliding_window: int, **options: Any) -> None:
        super().__init__(sliding_window, **options)
        self.compress_rate = 4


@pytest.mark.parametrize(("family", "kind", "made"), [
    ("qwen3", "full_attention", OddLayer), ("gemma3", "sliding_attention", MoreLayer),
])
def test_a_cache_class_that_nobody_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str, made: type
) -> None:
    monkeypatch.setitem(transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, kind, made)
    with pytest.raises(ConfigError, match=f"layer 0: {made.__name__} is no cache class"):
        describe(model_of(family), 8)


def test_a_model_that_keeps_something_elsewhere_is_refused() -> None:
    """The trial finds it: its output is not a function of its cache's layers."""
    model = make("qwen3")
    last = {"hidden": torch.zeros(32)}

    def leak(module: Any, args: Any, hidden: torch.Tensor) -> torch.Tensor:
        mixed = hidden + last["hidden"]
        last["hidden"] = hidden[0, -1]
        return mixed

    model.model.embed_tokens.register_forward_hook(leak)
    with pytest.raises(ConfigError, match="its logits differ"):
        describe(model, 8)


def test_a_layer_may_be_updated_twice_in_a_call() -> None:
    """What all updates of a call were given goes to pages, in their order."""
    model = make("qwen3")
    block = model.model.layers[0].self_attn
    forward = block.forward

    class Halves:
        def __init__(self, cache: Any) -> None:
            self._cache = cache

        def update(self, keys: Any, values: Any, layer: int, *more: Any, **options: Any) -> Any:
            self._cache.update(keys[:, :, :1], values[:, :, :1], layer, *more, **options)
            return self._cache.update(keys[:, :, 1:], values[:, :, 1:], layer, *more, **options)

    name = cache_name(model)

    def halved(*args: Any, **options: Any) -> Any:
        cache = options.pop(name)
        return forward(*args, **{name: cache and Halves(cache)}, **options)

    block.forward = halved
    assert [pool.name for pool in describe(model, 8).pools] == ["full"]


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "context_length": 64}
    model = transformers.AutoModelForCausalLM.from_config(transformers.RwkvConfig(**small))
    with pytest.raises(ConfigError, match="takes no cache"):
        describe(model.eval(), 8)


@pytest.mark.parametrize("page_size", [0, -8])
def test_a_page_has_a_size(page_size: int) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        describe(model_of("qwen3"), page_size)


# ``components_from``: what transformers' configuration says must be what the model, run, is seen to keep.


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "mistral", "gpt_oss", "cohere2", "phi3", "gemma2"])
def test_components_are_those_that_the_model_is_seen_to_keep(family: str) -> None:
    config = model_of(family).config
    described = layout_of(family, 16).cache_config(device_tokens=4096, host_tokens=8192)
    made = CacheConfig(model="m", page_size=16, components=components_from(config, device=4096, host=8192))
    assert described.sidecars == ()
    for ours, theirs in zip(made.pools(), described.pools(), strict=True):
        for name in ("name", "bytes_per_page", "layers", "device_pages", "host_pages", "dtype", "model_layers"):
            assert getattr(ours, name) == getattr(theirs, name), (family, name)
    windows = [one.window for one in made.components if isinstance(one, SlidingWindow)]
    assert windows == [one.window for one in described.components if isinstance(one, SlidingWindow)]


@pytest.mark.parametrize(
    "family", ["falcon_h1", "qwen3_next", "deepseek_v3", "deepseek_v4", "gemma3n", "lfm2", "mamba2"]
)
def test_a_model_that_keeps_something_else_is_refused(family: str) -> None:
    """Attention beside states in one layer, states, latent vectors, compressed layers, shared layers."""
    with pytest.raises(ConfigError, match="describe"):
        components_from(model_of(family).config, device=4096)


def text_model(**more: Any) -> SimpleNamespace:
    given = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
             "dtype": torch.bfloat16}  # fmt: skip
    return SimpleNamespace(**{**given, **more})


def test_bytes_are_shared_by_all_layers_and_heads_by_the_ranks() -> None:
    (full,) = components_from(text_model(), device="1MiB", host="4MiB")
    assert (full.kv_heads, full.head_dim, full.dtype) == (2, 8, "bfloat16")
    assert (full.device_tokens, full.host_tokens) == (4096, 16384)  # 4 layers * 2 * 2 heads * 8 * 2 bytes = 256 a token
    (half,) = components_from(text_model(), device="1MiB", tp=2)
    assert (half.kv_heads, half.device_tokens) == (1, 8192)
    (copied,) = components_from(text_model(), device="1MiB", tp=8)  # each head is on four ranks
    assert copied.kv_heads == 1
    mixed = text_model(sliding_window=128, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    components = components_from(mixed, device="1MiB")
    assert [one.device_tokens for one in components] == [4096, 4096]
    assert [one.bytes_per_token for one in components] == [64, 192]


def test_a_model_of_windows_alone_has_full_attention_without_bytes() -> None:
    full, swa = components_from(text_model(sliding_window=128), device=1024, dtype="float16")
    assert isinstance(full, Full)
    assert (full.bytes_per_token, swa.layers, swa.dtype) == (0, 4, "float16")
    (full,) = components_from(text_model(sliding_window=128, use_sliding_window=False), device=1024)
    assert full.layers == 4


@pytest.mark.parametrize(("changes", "given", "match"), [
    ({"dtype": None}, {}, "give the dtype"),
    ({"num_hidden_layers": None}, {}, "num_hidden_layers=None must be an integer"),
    ({"num_key_value_heads": [2, 4]}, {}, "num_key_value_heads"),
    ({"layer_types": ["sliding_attention"] * 4}, {}, "sliding_window=0 must be at least 1"),
    ({}, {"tp": 3}, "cannot be divided"),
    ({}, {"device": "1KiB"}, "less than 1024 tokens of 256 bytes"),
    ({}, {"device": "many"}, "device='many' is no size"),
    ({}, {"device": 1000}, "device_tokens=1000 is not a multiple"),
    ({}, {"dtype": "flaot32"}, "did you mean 'float32'"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(changes: dict[str, Any], given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CacheConfig(model="m", components=components_from(text_model(**changes), **{"device": 4096, **given}))


# The package's names: each is the same whatever was imported before it, and without transformers each says what to
# install.


ROOT = Path(__file__).parents[2]
(WANTED,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hf"]


def python(program: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with our packages to import."""
    path = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'scheduler_shim')]!r}\n"
    return subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True, timeout=120)


def test_no_name_is_hidden_by_a_module() -> None:
    """A module that is imported becomes an attribute of its package, and would be found before a name like it."""
    folder = ROOT / "scheduler_shim" / "asynccache_hf"
    assert not {file.stem for file in folder.glob("*.py")} & set(asynccache_hf.__all__)
    with pytest.raises(AttributeError, match="'asynccache_hf' has no attribute 'nothing'"):
        _ = asynccache_hf.nothing


@pytest.mark.parametrize(("absent", "says"), [
    ("transformers", "needs transformers"),                             # what brings it, beside a package or in a clone
    ("transformers.cache_utils", "needs another version of transformers"),  # transformers itself is installed
])
def test_without_transformers_or_a_module_of_it_a_name_says_what_brings_it(absent: str, says: str) -> None:
    done = python(f"sys.modules[{absent!r}] = None; import asynccache_hf; print('imported'); asynccache_hf.describe")
    assert done.stdout == "imported\n"
    assert done.stderr.splitlines()[-1].endswith(f"asynccache_hf {says}: pip install '{WANTED}'")


def test_with_an_older_transformers_a_name_says_which_one_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.22, the one before the oldest that is named, has no ``DummyLayer``."""
    monkeypatch.delattr(transformers.cache_utils, "DummyLayer")
    monkeypatch.delitem(sys.modules, "asynccache_hf.description", raising=False)
    monkeypatch.delitem(vars(asynccache_hf), "describe", raising=False)
    with pytest.raises(ImportError, match="cannot import name 'DummyLayer'") as told:
        _ = asynccache_hf.describe
    assert str(told.value).endswith(f"asynccache_hf needs another version of transformers: pip install '{WANTED}'")


def test_without_transformers_own_continuous_batching_everything_is_there() -> None:
    """Nothing of it is used, so no later version of it breaks anything."""
    folder = ROOT / "scheduler_shim" / "asynccache_hf"
    assert not [file.name for file in folder.glob("*.py") if "continuous_batching" in file.read_text()]


def test_the_oldest_version_that_is_named_is_the_one_of_the_gate() -> None:
    """And no version is too new: a model's trial decides (``make test-transformers`` tries the newest)."""
    named = Requirement(WANTED).specifier
    pins = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("transformers=="))
    gate = next(pins).partition("==")[2]
    major, minor = (int(part) for part in gate.split(".")[:2])
    assert named.contains(gate)
    assert not named.contains(f"{major}.{minor - 1}.9")
    assert named.contains("99.0.0")
