"""The command line as a whole: help and options."""

from __future__ import annotations

import argparse
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import asynccache
from asynccache import compiled
from asynccache.cli import plan
from asynccache.cli.main import COMMANDS
from asynccache.cli.options import RunSettings
from asynccache.cli.run_cache import configure, tokens_needed
from asynccache.cli.traces import Trace, TraceRequest, survey
from asynccache.config import CacheConfig, Full, Mamba, SlidingWindow
from asynccache.core.eviction import Lru
from asynccache.core.policies import POLICIES
from asynccache.core.settings import WritePolicy
from asynccache.errors import ConfigError
from tests.processes import Command, run

# The command line as a whole: help, versions, benchmarks that are imported only when asked for, and the size of tiers
# that hold everything.


def test_help_and_version(command: Command) -> None:
    assert command("--version").stdout == f"asynccache {asynccache.__version__}, {compiled.CORE} core\n"
    for arguments in ((), ("--help",), ("replay", "--help"), ("stress", "--help"), ("bench", "--help")):
        assert "usage: asynccache" in command(*arguments).stdout


def test_room_for_all_counts_every_page_once() -> None:
    trace = Trace([TraceRequest(0, 1024, 10, (1, 2)), TraceRequest(0, 1124, 10, (1, 2, 3)),
                   TraceRequest(0, 600, 10, (7, 8))])
    given = {"trace": "t", "concurrency": "1", "decode_tokens": "0", "page_size": "512",
             "insert_outputs": False}
    settings = RunSettings.read("replay", {**given, "device_tokens": "all", "host_tokens": "none"})
    needed = tokens_needed(settings, trace, survey(trace))
    assert needed % 512 == 0
    assert 4 * 512 <= needed <= 16 * 512
    (component,) = configure(settings, trace, survey(trace)).components
    assert isinstance(component, Full)
    assert (component.device_tokens, component.host_tokens) == (needed, 0)


def test_swa_and_mamba_get_their_part() -> None:
    settings = RunSettings.read("stress", {"components": "full,swa,mamba", "swa_ratio": "0.25",
                                           "device_tokens": "16384", "host_tokens": "32768"})
    _, swa, mamba = configure(settings).components
    assert isinstance(swa, SlidingWindow)
    assert (swa.device_tokens, swa.host_tokens) == (4096, 8192)
    assert isinstance(mamba, Mamba)
    assert mamba.device_states > settings.concurrency


def with_sidecars(**given: str) -> CacheConfig:
    return configure(RunSettings.read("stress", {"components": "full,swa", **given}))


def test_the_list_of_sidecars_says_which_pool_hangs_on_which_and_how_large_it_is() -> None:
    specs = with_sidecars(sidecars="idx:full:32, draft:idx:6,state:swa:1", page_size="16", layers="4").sidecars
    assert [(s.name, s.indices_from, s.bytes_per_page, s.layers) for s in specs] == [
        ("idx", "full", 512, 4), ("draft", "idx", 96, 4), ("state", "swa", 16, 4),
    ]  # fmt: skip
    odd = with_sidecars(sidecars="idx:full:1", page_size="3", layers="4", device_tokens="3000", host_tokens="6000")
    assert odd.sidecars[0].layers == 1
    assert with_sidecars().sidecars == with_sidecars(sidecars="none").sidecars == ()
    assert with_sidecars().components[0].bytes_per_token == 512  # type: ignore[union-attr]


@pytest.mark.parametrize(("page", "state"), [("16", True), ("128", False), ("256", False)])
def test_the_preset_of_sidecars_has_the_layout_of_the_model(page: str, state: bool) -> None:
    specs = {s.name: s for s in with_sidecars(sidecars="deepseek-v4,draft:full:8", page_size=page, device_tokens="1024",
                                              host_tokens="2048", swa_ratio="1").pools()}  # fmt: skip
    assert specs.pop("full").bytes_per_page == 0
    assert ("c128_state" in specs) == state
    sources = {name: spec.indices_from for name, spec in specs.items() if name != "c128_state"}
    assert sources == {"swa": None, "c4": "full", "c4_indexer": "full", "c128": "full", "c4_state": "swa",
                       "c4_indexer_state": "swa", "draft": "full"}  # fmt: skip
    assert specs["c4"].bytes_per_page * 4 == specs["swa"].bytes_per_page == int(page) * 512
    assert specs["c128"].bytes_per_page * 128 == specs["swa"].bytes_per_page
    assert with_sidecars(sidecars="deepseek-v4").components[0].layers == 1


@pytest.mark.parametrize(("line", "offered"), [
    ("asynccache st", {"stress", "store"}), ("asynccache stress --prefetch-p", {"--prefetch-policy"}),
    ("asynccache replay --rank-d", {"--rank-delay"}), ("asynccache store cl", {"clear"}),
    ("asynccache bench ", {"store"}),
])
def test_a_shell_completes_commands_and_their_options(line: str, offered: set[str], tmp_path: Path) -> None:
    environment = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
                                "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "offered")}
    done = run("-m", "asynccache", env=environment)
    assert done.returncode == 0, done.stderr
    words = {word.strip() for word in (tmp_path / "offered").read_text().split("\n")}
    assert offered <= words
    assert all(word.startswith(line.rpartition(" ")[2]) for word in words)


# Options: what wins over what, and that everything unusable is refused by name before anything starts.


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


def test_a_policy_of_ones_own_is_an_option_as_soon_as_it_was_added(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    with pytest.raises(ConfigError):
        stress("--eviction", "own")
    monkeypatch.setitem(POLICIES, "own", lambda config: Lru())
    assert stress("--eviction", "own").eviction == replay("--eviction", "own").eviction == "own"
    assert "lru, p2c, own" in command("stress", "--help").stdout


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
