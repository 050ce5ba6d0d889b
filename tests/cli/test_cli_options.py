"""Options: what wins over what, and that everything unusable is refused by name before anything starts."""

from __future__ import annotations

import argparse
from contextlib import suppress
from importlib import import_module

import pytest

from asynccache.cli import plan
from asynccache.cli.main import COMMANDS, main
from asynccache.cli.options import RunSettings
from asynccache.cli.run_cache import configure
from asynccache.core.eviction import Lru
from asynccache.core.policies import POLICIES
from asynccache.core.settings import WritePolicy
from asynccache.errors import ConfigError


def stress(*arguments: str) -> RunSettings:
    parser = argparse.ArgumentParser()
    RunSettings.add_arguments(parser, "stress")
    return RunSettings.read("stress", vars(parser.parse_args(arguments)))


def replay(*arguments: str) -> RunSettings:
    parser = argparse.ArgumentParser()
    RunSettings.add_arguments(parser, "replay")
    return RunSettings.read("replay", vars(parser.parse_args(["t.jsonl", *arguments])))


def test_values_arrive_in_their_types() -> None:
    settings = replay("--components", "full,swa,mamba", "--device-tokens", "all", "--host-tokens", "none",
                      "--insert-outputs", "--write-policy", "write_back", "--speed", "2", "--storage", "none")
    assert settings.components == ("full", "swa", "mamba")
    assert (settings.device_tokens, settings.host_tokens) == ("all", 0)
    assert settings.insert_outputs
    assert settings.write_policy is WritePolicy.WRITE_BACK
    assert settings.speed == 2.0
    assert settings.storage is None
    assert settings.trace == "t.jsonl"


def test_a_policy_of_ones_own_is_an_option_as_soon_as_it_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        stress("--eviction", "own")
    monkeypatch.setitem(POLICIES, "own", lambda config: Lru())
    assert stress("--eviction", "own").eviction == replay("--eviction", "own").eviction == "own"


def test_commands_share_one_profile_of_defaults() -> None:
    """They differ in the load and, since a stress run has 20 seconds to fill it, in the size of the cache."""
    one, other = stress(), replay("--speed", "0")
    differs = {name for name in RunSettings.__struct_fields__ if getattr(one, name) != getattr(other, name)}
    assert differs == {"command", "trace", "workload", "rate", "device_tokens", "host_tokens"}
    planned = plan.Options.read("plan", {"trace": "t.jsonl"})
    assert (planned.eviction, planned.prefill_tokens_per_s, planned.device_tokens) == (
        other.eviction, other.prefill_tokens_per_s, other.device_tokens)
    assert planned.host_gib[0] * (1 << 30) / planned.bytes_per_token == other.host_tokens


def test_without_a_host_tier_the_usual_store_is_left_out() -> None:
    assert stress("--host-tokens", "none").storage is replay("--host-tokens", "none").storage is None
    assert stress("--host-tokens", "1600").storage == "memory:?capacity=1GiB"


def test_several_stores_are_several_options() -> None:
    urls = ("file:/var/k v?capacity=1GiB", "memory:?capacity=1MiB")
    assert stress("--storage", urls[0], "--storage", urls[1]).storage == urls
    assert stress("--storage", urls[0]).storage == urls[0]
    with pytest.raises(ConfigError, match="must be 'none' or a URL"):
        stress("--storage", "memory:", "--storage", "/var/kv")


ABSURD = ("", " ", "-1", "9" * 5000, "1_0", "nan", "inf", "1e400", "a:full:" + "9" * 5000, "cuda:" + "9" * 5000, "\0",
          "\ud800", ":", ",", "\n")  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("text", ABSURD)
def test_no_text_of_an_option_is_a_bug(command: str, text: str) -> None:
    """It is read or refused, by the name of the option."""
    options = import_module(f"asynccache.cli.{COMMANDS[command][0]}").Options
    for name, field in options.fields(command).items():
        if not isinstance(field.default, bool):
            label = field.extra["metavar"] if "argument" in field.extra else f"--{name.replace('_', '-')}"
            said = label
            try:
                options.values(command, {name: [text] if "several" in field.extra else text})
            except ConfigError as error:
                said = str(error)
            assert label in said


@pytest.mark.parametrize(("name", "texts"), [("sidecars", ["a:full:" + "9" * 5000]), ("replicated", ["", "a:", ":tp"])])
def test_no_text_of_pools_is_a_bug(name: str, texts: list[str]) -> None:
    for text in texts:
        with suppress(ConfigError):
            configure(stress(f"--{name}", text))


def test_every_option_of_a_command_is_a_setting() -> None:
    names = {*RunSettings.fields("replay"), *RunSettings.fields("stress")}
    assert names == {*RunSettings.__struct_fields__} - {"command", "cache"}


def test_settings_are_reported_as_plain_values() -> None:
    values = stress("--write-policy", "write_back").plain()
    assert values["write_policy"] == "write_back"
    assert values["page_size"] == 16


def test_help_lists_a_policy_that_was_added(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(POLICIES, "mine", Lru)
    with pytest.raises(SystemExit):
        main(["stress", "--help"])
    assert "lru, p2c, mine" in capsys.readouterr().out
