"""KV that was computed with other weights or adapters is never served, in this process or from a store; judged by what
``model.generate`` makes now."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asynccache_hf import ContinuousBatching, PagedModel, PrefixCache, describe
from asynccache_hf.identity import ModelIdentity, plain, stamp_of

from asynccache import Adapter
from asynccache.errors import ConfigError
from tests.engine.engine_kit import model_of, prompt
from tests.engine.engine_models import make

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SIZES: dict[str, Any] = {"page_size": 8, "device_tokens": 512, "host_tokens": 1024}
TEXT = torch.tensor([prompt(45)])
HIT = 40


def asked(cached: PrefixCache, judge: Any, text: torch.Tensor = TEXT) -> int:
    """Generate, compare with ``judge.generate``, and return how many tokens of the prompt were cached."""
    before = cached.counts
    made = cached.generate(text, max_new_tokens=9, do_sample=False)
    assert made.tolist() == judge.generate(text, max_new_tokens=9, do_sample=False).tolist()
    return sum(cached.counts[1:]) - sum(before[1:])


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "asynccache_hf")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("asynccache_hf")]


# weights


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)


def with_key(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """What is done to a model by ``change`` of a projection of keys."""
    return lambda model: change(model.model.layers[0].self_attn.k_proj)


def other_weights() -> dict[str, torch.Tensor]:
    return make("llama", seed=1).state_dict()  # type: ignore[no-any-return]


def loaded(model: Any) -> None:
    model.load_state_dict(other_weights())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": in_place,
    "through data": with_key(lambda key: key.weight.data.mul_(-1.5)),
    "other data": with_key(lambda key: setattr(key.weight, "data", key.weight.data * -1.5)),
    "another parameter": with_key(
        lambda key: setattr(key, "weight", torch.nn.Parameter(key.weight.detach() * -1.5))),
    "another module": lambda model: setattr(
        model.model.layers[0].self_attn, "k_proj", torch.nn.Linear(32, 16, bias=False).eval()),
    "loaded": loaded,
    "assigned": lambda model: model.load_state_dict(other_weights(), assign=True),
    "a buffer that is not saved": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "another buffer": lambda model: model.model.rotary_emb.register_buffer(
        "inv_freq", model.model.rotary_emb.inv_freq * 0.5, persistent=False),
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", None])
@pytest.mark.parametrize("what", CHANGES)
def test_changed_weights_make_a_miss_of_everything_with_one_warning(
    what: str, name: str | None, warned: Callable[[], list[str]]
) -> None:
    """Buffers that are not saved among them."""
    model = make("llama")
    with PrefixCache(model, name=name, **SIZES) as cached:
        assert asked(cached, model) == 0
        assert asked(cached, model) == HIT
        CHANGES[what](model)
        assert asked(cached, model) == 0
        assert asked(cached, model) == HIT
        in_place(model)
        assert asked(cached, model) == 0
    assert [said.partition(",")[0] for said in warned()] == ["asynccache: the model's weights have changed"]


@pytest.mark.parametrize("name", ["llama", None])
def test_a_configuration_that_is_edited_makes_a_miss_until_it_is_as_it_was(
    name: str | None, warned: Callable[[], list[str]]
) -> None:
    """What reads it when the model runs is up to the model: frequencies that follow the length do, and attention."""
    model = make("llama_dynamic")
    with PrefixCache(model, name=name, **SIZES) as cached:
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        before = model.config.rope_parameters["rope_theta"]
        model.config.rope_parameters["rope_theta"] = 3 * before
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        model.config.rope_parameters["rope_theta"] = before
        assert asked(cached, model) == HIT
        usual = model.config._attn_implementation
        model.set_attn_implementation("eager" if usual == "sdpa" else "sdpa")
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        model.set_attn_implementation(usual)
        assert asked(cached, model) == HIT
    assert [said.partition(",")[0] for said in warned()] == ["asynccache: the model's configuration has changed"]


def test_named_weights_that_are_restored_are_missed_and_then_found(warned: Callable[[], list[str]]) -> None:
    """They were not read when they were named, so nothing tells that they are the same."""
    model = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with PrefixCache(model, name="llama", **SIZES) as cached:
        asked(cached, model)
        loaded(model)
        asked(cached, model)
        model.load_state_dict(before)
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]


def test_weights_that_are_as_they_were_find_their_pages_again(warned: Callable[[], list[str]]) -> None:
    model = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with PrefixCache(model, **SIZES) as cached:
        asked(cached, model)
        model.load_state_dict(before)                  # written, with the same numbers
        assert asked(cached, model) == HIT
        assert not warned()
        loaded(model)
        assert asked(cached, model) == 0
        model.load_state_dict(before)
        assert asked(cached, model) == HIT


def test_generating_changes_nothing_of_the_identity(warned: Callable[[], list[str]]) -> None:
    """Rotary embeddings that follow the length write their own buffers."""
    for family in ("llama_dynamic", "phi3_longrope", "deepseek_v3"):
        model = make(family)
        with PrefixCache(model, name=family, **SIZES) as cached:
            asked(cached, model)
            cached.generate(torch.tensor([prompt(120, seed=3)]), max_new_tokens=2)    # beyond the limit of two of them
            assert asked(cached, model) == HIT
    assert not warned()


def test_a_model_that_runs_is_what_it_is_at_rest() -> None:
    """transformers notes some arguments of a call in the configuration until the call ends; another thread may ask."""
    model = make("llama")
    identity, found = ModelIdentity(model, "llama"), list[str]()
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: found.append(identity.now()))
    model(TEXT, is_causal=True)
    handle.remove()
    assert found == [""]


def test_what_was_computed_while_the_weights_changed_is_not_published() -> None:
    model = make("llama")

    def change(module: Any, args: Any) -> None:
        if changing:
            changing.clear()
            in_place(model)

    changing: list[int] = []
    with PrefixCache(model, name="llama", **SIZES) as cached:
        handle = model.model.layers[1].register_forward_pre_hook(change)
        changing.append(1)
        cached.generate(TEXT, max_new_tokens=9, do_sample=False)
        handle.remove()
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.div_(-1.5)
        assert asked(cached, model) == 0
        assert asked(cached, model) == HIT


@pytest.mark.parametrize("open_it", [lambda model: describe(model, 8, name="x"), lambda model: PrefixCache(model)])
def test_train_mode_is_refused_by_that_name(open_it: Callable[[Any], Any]) -> None:
    model = make("llama").train()
    with pytest.raises(ConfigError, match=r"in train\(\) mode .*call model.eval\(\)"):
        open_it(model)


def test_train_mode_is_refused_later_too_and_in_a_part() -> None:
    model = make("llama")
    with PrefixCache(model, name="llama", **SIZES) as cached:
        model.model.layers[1].self_attn.train()
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM is in train\(\) mode \(its \w+ is\)"):
            cached.generate(TEXT)
        model.eval()
        assert asked(cached, model) == 0


def test_a_model_that_was_converted_needs_another_cache() -> None:
    model = make("llama")
    with PrefixCache(model, name="llama", **SIZES) as cached:
        model.bfloat16()
        with pytest.raises(ConfigError, match=r"was torch\.float32 on cpu .* is torch\.bfloat16 on cpu now"):
            cached.generate(TEXT)


def test_buffers_are_part_of_the_name() -> None:
    """Those that are not saved, too: here the frequencies of rotary embeddings."""
    model, other = make("llama"), make("llama")
    assert ModelIdentity(model).name == ModelIdentity(other).name
    other.model.rotary_emb.inv_freq.mul_(0.5)
    assert ModelIdentity(model).name != ModelIdentity(other).name


def test_the_version_of_transformers_is_no_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ModelIdentity(make("llama")).name
    monkeypatch.setattr("transformers.configuration_utils.__version__", "6.0.0")
    assert make("llama").config.to_dict()["transformers_version"] == "6.0.0"
    assert ModelIdentity(make("llama")).name == name


def test_inference_tensors_and_weights_that_are_not_here() -> None:
    with torch.inference_mode():
        model = make("llama")
    with PrefixCache(model, name="llama", **SIZES) as cached:
        asked(cached, model)
        assert asked(cached, model) == HIT
    away = make("llama").to("meta")
    with pytest.raises(ConfigError, match=r"these weights cannot be read .*; give the model a name="):
        ModelIdentity(away)
    assert ModelIdentity(away, "x").now() == ""


def test_an_adapters_name_in_events_stays_beside_the_models_own_namespace() -> None:
    within = ModelIdentity.within
    assert within("", "a") == "a"
    keys = [within("now", key) for key in (None, "", b"", "a", b"b", "61")]
    assert len({*keys, within("later", "a")}) == 6       # text and its bytes are one key
    assert within("now", "a") == within("now", b"a")
    assert within("", keys[3]) not in keys               # who names a key like one that is made does not get its pages
    told = within("now", Adapter("a", "french", 3))
    assert isinstance(told, Adapter)
    assert (told, told.lora_name, told.lora_id) == (keys[3], "french", 3)


def batched(batching: ContinuousBatching, judge: Any) -> int:
    """The same in a batch."""
    (made,) = batching.generate_batch([prompt(45)], max_new_tokens=9, eos_token_id=-1)
    assert made.error is None
    assert made.output == judge.generate(TEXT, max_new_tokens=9, do_sample=False)[0, 45:].tolist()
    return sum(made.hits or ())


def test_continuous_batching_looks_before_each_request_too() -> None:
    model, twin = make("llama"), make("llama")

    def hits() -> int:
        return batched(batching, twin)

    def change(module: Any, args: Any) -> None:
        handle.remove()
        in_place(model)

    with ContinuousBatching(model, name="llama", **SIZES) as batching:
        assert [hits(), hits()] == [0, HIT]
        for each in (model, twin):
            in_place(each)
        assert [hits(), hits()] == [0, HIT]
        model.train()
        with pytest.raises(ConfigError, match=r"in train\(\) mode"):
            hits()
        model.eval()
        loaded(model)
        loaded(twin)
        handle = model.model.layers[1].register_forward_pre_hook(change)
        batching.generate_batch([prompt(45)], max_new_tokens=9)          # computed with both
        loaded(model)
        assert [hits(), hits()] == [0, HIT]


# what wraps a model


def test_a_compiled_model_is_the_model_inside() -> None:
    model = make("llama")
    compiled = torch.compile(model, backend="eager")
    assert describe(compiled, 8).model == describe(model, 8).model
    with PrefixCache(compiled, name="llama", **SIZES) as cached:
        asked(cached, compiled)
        assert asked(cached, compiled) == HIT
        in_place(model)
        assert asked(cached, compiled) == 0


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is not installed: pip install peft")


def add_by_transformers(model: Any, config: Any, name: str) -> None:
    try:
        model.add_adapter(config, name)
    except ValueError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def adapted(peft: Any, model: Any, name: str = "french", seed: int = 5, **more: Any) -> Any:
    """A model of PEFT's with an adapter of random weights on keys and values."""
    torch.manual_seed(seed)
    settings = {"target_modules": ["k_proj", "v_proj"], "init_lora_weights": False, "r": 4, **more}
    return peft.get_peft_model(model, peft.LoraConfig(**settings), adapter_name=name).eval()


def add(peft: Any, model: Any, name: str, seed: int = 6) -> None:
    torch.manual_seed(seed)
    model.add_adapter(name, peft.LoraConfig(target_modules=["k_proj", "q_proj"], init_lora_weights=False, r=2))
    model.eval()


def test_adapters_that_are_switched_have_namespaces_of_their_own(peft: Any, warned: Callable[[], list[str]]) -> None:
    model = adapted(peft, make("llama"))
    add(peft, model, "legal")
    with PrefixCache(model, name="llama", **SIZES) as cached:
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        model.set_adapter("legal")
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        with model.disable_adapter():
            assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        model.base_model.set_adapter(["french", "legal"])
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        for one in ("french", "legal"):
            model.set_adapter(one)
            assert asked(cached, model) == HIT
        assert not warned()


def test_continuous_batching_takes_a_model_of_peft(peft: Any) -> None:
    model, twin = (adapted(peft, make("llama")) for _ in range(2))
    for each in (model, twin):
        add(peft, each, "legal")
    with ContinuousBatching(model, name="llama", **SIZES) as batching:
        for adapter, found in (("french", 0), ("legal", 0), ("french", HIT), ("legal", HIT)):
            for each in (model, twin):
                each.set_adapter(adapter)
            assert batched(batching, twin) == found


def test_adding_an_adapter_leaves_the_pages_of_others(peft: Any, warned: Callable[[], list[str]]) -> None:
    """Also one that wraps layers which had none."""
    model = adapted(peft, make("llama"))
    with PrefixCache(model, name="llama", **SIZES) as cached:
        asked(cached, model)
        add(peft, model, "legal")
        model.set_adapter("french")
        model.eval()
        assert asked(cached, model) == HIT
        assert not warned()


def test_an_adapter_that_is_trained_or_scaled_misses(peft: Any, warned: Callable[[], list[str]]) -> None:
    model = adapted(peft, make("llama"))
    layer = plain(model).model.layers[0].self_attn.k_proj
    with PrefixCache(model, name="llama", **SIZES) as cached:
        asked(cached, model)
        layer.scaling["french"] *= 3
        assert asked(cached, model) == 0
        assert not warned()
        with torch.no_grad():
            layer.lora_B["french"].weight.mul_(2)
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        assert [said.partition(",")[0] for said in warned()] == [
            "asynccache: the weights of the adapter 'french' have changed"
        ]


def test_settings_of_an_adapter_that_are_no_numbers_count_too(peft: Any) -> None:
    """Which entries of a weight it replaces, and which tokens it knows of."""

    def identity(config: Any, trained: str) -> str:
        model = peft.get_peft_model(make("llama"), config).eval()
        for name, weight in model.named_parameters():
            if trained in name:
                torch.nn.init.constant_(weight, 0.5)
        return ModelIdentity(plain(model), "llama").now()

    names = [identity(peft.ShiraConfig(target_modules=["k_proj"], r=2, random_seed=seed), "shira_weight")
             for seed in (1, 1, 2)]  # fmt: skip
    assert names[0] == names[1] != names[2]
    tokens = [
        identity(peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=indices, init_weights=True),
                 "trainable_tokens_delta")
        for indices in ([1, 2], [1, 2], [1, 3])
    ]  # fmt: skip
    assert tokens[0] == tokens[1] != tokens[2]


def test_a_setting_of_an_adapter_that_is_a_tensor_is_looked_at_for_each_request(peft: Any) -> None:
    model = peft.get_peft_model(make("llama"), peft.ShiraConfig(target_modules=["k_proj"], r=2, init_weights=False))
    identity = ModelIdentity(plain(model.eval()), "llama")
    before = identity.now()
    assert identity.now() == before
    layer = plain(model).model.layers[0].self_attn.k_proj
    layer.shira_indices["default"] = layer.shira_indices["default"].flip(1)
    assert identity.now() != before


def test_a_merged_adapter_misses_and_what_is_unmerged_is_found(peft: Any) -> None:
    model = adapted(peft, make("llama"))
    with PrefixCache(model, name="llama", **SIZES) as cached:
        asked(cached, model)
        model.merge_adapter()
        assert asked(cached, model) == 0


def test_an_adapter_that_transformers_itself_loads(peft: Any) -> None:
    model = make("llama")
    with PrefixCache(model, name="llama", **SIZES) as cached:
        asked(cached, model)
        torch.manual_seed(5)
        config = peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False, r=4)
        add_by_transformers(model, config, "french")
        assert [asked(cached, model), asked(cached, model)] == [0, HIT]
        model.disable_adapters()
        assert asked(cached, model) == HIT
        model.enable_adapters()
        assert asked(cached, model) == HIT


@pytest.mark.parametrize("name", ["llama", None])
def test_another_process_with_another_adapter_does_not_hit_its_pages(
    peft: Any, tmp_path: Path, name: str | None
) -> None:
    url = f"file:{tmp_path}?capacity=64MiB&segment=8MiB"

    def opened(model: Any) -> int:
        with PrefixCache(model, name=name, storage=url, **SIZES) as cached:
            return asked(cached, model)

    first = adapted(peft, make("llama"))
    assert opened(first) == 0
    assert opened(adapted(peft, make("llama"))) == HIT                       # the same adapter
    assert opened(adapted(peft, make("llama"), seed=7)) == 0                 # of the same name
    assert opened(adapted(peft, make("llama"), name="other")) == 0
    assert opened(adapted(peft, make("llama"), lora_alpha=32)) == 0          # the same weights, scaled
    assert opened(make("llama")) == 0


def test_describe_names_the_adapter_and_pages_compute_with_it(peft: Any) -> None:
    model = adapted(peft, make("llama"))
    layout = describe(model, 8, name="llama")
    assert layout.model.startswith("llama+")
    assert describe(adapted(peft, make("llama"), seed=7), 8, name="llama").model != layout.model
    with model.disable_adapter():
        assert describe(model, 8).model == describe(make("llama"), 8).model
    with PrefixCache(model, name="llama", **SIZES) as cached:
        assert PagedModel(model, layout, cached._cache.pools)._model is plain(model)


def test_adapters_that_depend_on_more_than_tokens_are_refused(peft: Any) -> None:
    prompted = peft.get_peft_model(make("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ConfigError, match="adapter 'default': PROMPT_TUNING puts tokens of its own before"):
        PrefixCache(prompted.eval())
    invoked = adapted(peft, make("llama"), task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2])
    with pytest.raises(ConfigError, match="adapter 'french': how it is applied depends on the whole prompt"):
        PrefixCache(invoked)


def test_dropout_of_an_adapter_in_train_mode_is_refused(peft: Any) -> None:
    model = make("llama")
    add_by_transformers(model, peft.LoraConfig(target_modules=["k_proj"], lora_dropout=0.1), "french")  # in train mode
    with pytest.raises(ConfigError, match=r"in train\(\) mode \(its Dropout is\)"):
        PrefixCache(model)
    assert model_of("llama") is not model


def test_a_weight_that_is_not_contiguous_is_looked_at_too() -> None:
    """Neither its count nor its address changes when it is changed through ``data``."""
    weight = torch.nn.Parameter(torch.randn(8, 16).t(), requires_grad=False)
    assert not weight.is_contiguous()
    before = stamp_of([weight])
    assert stamp_of([weight]) == before
    weight.data.mul_(2)
    assert stamp_of([weight]) != before
