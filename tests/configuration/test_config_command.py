"""``asynccache config``, the files that runs are given, and that no command ever answers with a traceback."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from asynccache import ConfigError, Full, SlidingWindow, WritePolicy, load_config
from asynccache.cli import main as program
from asynccache.cli.options import RunSettings
from asynccache.cli.run_cache import configure
from tests.processes import ROOT, Command

KV = """\
model = "m"
page_size = 16
storage = "memory:?capacity=1MiB"
[components.full]
bytes_per_token = 64
layers = 2
device_tokens = 16384
host_tokens = 32768
[components.swa]
window = 64
bytes_per_token = 32
device_tokens = 16384
host_tokens = 16384
"""


@pytest.fixture
def kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ASYNCCACHE_CONFIG", raising=False)
    file = tmp_path / "kv.toml"
    file.write_text(KV)
    return file


def test_show_prints_what_can_be_loaded_again(kv: Path, tmp_path: Path, command: Command) -> None:
    shown = command("config", "show", str(kv)).stdout
    assert f"# {kv}" in shown
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert load_config(again, env={}) == load_config(kv, env={})


def test_check_says_that_a_file_can_be_used(kv: Path, command: Command) -> None:
    captured = command("config", "check", kv)
    assert captured.stdout.splitlines() == [
        f"{kv}: can be used",
        "  full: 2 layers, 64 bytes a token; device 1 MiB for 16,384 tokens, host 2 MiB for 32,768 tokens",
        "  swa: 1 layer, 32 bytes a token; device 512 KiB for 16,384 tokens, host 512 KiB for 16,384 tokens",
    ]
    assert captured.stderr == ""


@pytest.mark.parametrize(("model", "store", "warned"), [
    ("m", "file:/var/kv?capacity=1GiB", True), ("m", "memory:", False), ("m", "none", False),
    ("m-0123456789abcdef0123456789abcdef", "file:/var/kv?capacity=1GiB", False),
])  # fmt: skip
def test_check_warns_of_a_name_that_new_weights_may_have_too(
    kv: Path, command: Command, model: str, store: str, warned: bool
) -> None:
    kv.write_text(KV.replace('"m"', f'"{model}"').replace("memory:?capacity=1MiB", store))
    warning = command("config", "check", str(kv)).stderr
    assert ("warning: model='m' names no weights" in warning and "weights_digest" in warning) == warned
    assert warned or warning == ""


def test_check_lists_everything_that_is_wrong(kv: Path, command: Command) -> None:
    kv.write_text(KV.replace("window", "windw").replace("page_size = 16", "page_size = 0") + "[stress]\nrequests = 5\n")
    lines = command("config", "check", str(kv), status=1).stderr.splitlines()
    assert lines == [
        f"asynccache: page_size=0 must lie between 1 and 65536 ({kv})",
        f"asynccache: components.swa.windw=64 ({kv}): there is no such setting; did you mean 'window'?",
        f"asynccache: stress ({kv}): there is no such setting",
        "asynccache: components.swa.window is not given: Tokens that a position attends to.",
    ]


def test_the_variables_on_the_page_are_of_the_file_on_the_page(kv: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    (file,), (variables,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)
                             for kind in ('toml title="kv.toml"', "sh"))  # fmt: skip
    kv.write_text(file)
    config = load_config(kv, env=dict(re.findall(r"^export (\w+)=(\S+)", variables, re.MULTILINE)))
    assert (config.page_size, config.sidecars[0].bytes_per_page) == (32, 1024)
    assert config.storage_options["capacity"] == "20GiB"


def stress(file: Path, env: dict[str, str] | None = None, **given: object) -> RunSettings:
    return RunSettings.read("stress", {"config": str(file), **given}, env or {})


def test_a_run_has_the_cache_that_its_file_describes(kv: Path) -> None:
    settings = stress(kv)
    config = configure(settings)
    assert config == load_config(kv, env={})
    assert (settings.page_size, settings.window, settings.components) == (16, 64, ("full", "swa"))
    assert [type(component) for component in config.components] == [Full, SlidingWindow]


def test_options_win_over_the_environment_over_the_file(kv: Path) -> None:
    env = {"ASYNCCACHE_PAGE_SIZE": "32", "ASYNCCACHE_WRITE_POLICY": "write_back"}
    settings = stress(kv, env, page_size="64")
    assert (settings.page_size, settings.write_policy) == (64, WritePolicy.WRITE_BACK)
    assert configure(settings).page_size == 64
    assert configure(stress(kv, {}, storage="none")).storage is None


@pytest.mark.parametrize(("given", "message"), [
    ({"layers": "2"}, "--layers=2: .*kv.toml describes the components"),
    ({"device_tokens": "512"}, "--device-tokens=512: "),
    ({"page_size": "100"}, r"not a multiple of page_size=100 \(page_size: Python"),
])
def test_what_the_file_says_about_its_components_stands(kv: Path, given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stress(kv, {}, **given)


def test_a_run_is_on_the_device_of_the_file_unless_it_is_told_another(kv: Path) -> None:
    assert stress(kv, {"ASYNCCACHE_DEVICE": "cuda:1"}).device == "cuda:1"
    told = stress(kv, {"ASYNCCACHE_DEVICE": "cuda:1"}, device="cpu")
    assert told.cache is not None
    assert told.device == told.cache.device == "cpu"
    with pytest.raises(ConfigError, match="--device=gpu: unknown device 'gpu'; one of cpu, cuda, cuda:N"):
        stress(kv, {}, device="gpu")


def test_the_whole_of_a_described_cache_is_in_the_report(kv: Path, command: Command) -> None:
    report = command("stress", "--config", kv, "--requests", "12", "--rate", "0", "--quiet", "--json", "-").stdout
    assert json.loads(report)["settings"]["cache"]["components"][1]["window"] == 64


@pytest.mark.parametrize("more", [[], ["--faults", "0.01"]])
def test_a_run_hands_the_options_of_storage_on(kv: Path, more: list[str], command: Command) -> None:
    kv.write_text(KV + '[storage_options]\ncapasity = "1MiB"\n')
    assert "unknown option 'capasity'" in command("stress", "--config", str(kv), "--quiet", *more, status=2).stderr


def broken(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def dispatch(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(program, "_dispatch", dispatch)
    monkeypatch.delenv("ASYNCCACHE_DEBUG", raising=False)


def test_a_bug_is_one_line_and_how_to_see_where(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    broken(monkeypatch, KeyError("x"))
    said = command("stress", status=3)
    assert said.stderr == "asynccache: KeyError: 'x'; this is a bug in asynccache, --debug shows where\n"
    assert said.stdout == ""


@pytest.mark.parametrize(("arguments", "debug"), [(["stress", "--debug"], ""), (["stress"], "1")])
def test_who_asks_sees_the_traceback(
    arguments: list[str], debug: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    broken(monkeypatch, KeyError("x"))
    monkeypatch.setenv("ASYNCCACHE_DEBUG", debug)
    assert "Traceback" in command(*arguments, status=3).stderr


def test_what_the_system_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    broken(monkeypatch, PermissionError(13, "Permission denied", "/x/y"))
    assert command("stress", status=2).stderr == "asynccache: /x/y: Permission denied\n"


def test_json_goes_to_a_file_or_in_place_of_the_text(kv: Path, command: Command) -> None:
    """As with every command; and a settings file behind ``--json`` is read, never written."""
    out = kv.with_suffix(".json")
    shown = json.loads(command("config", "show", str(kv), "--json").stdout)
    assert {"setting": "model", "value": "m", "from": str(kv)} in shown
    for words in (["--json", "-", str(kv)], ["--json", str(kv)]):
        assert json.loads(command("config", "show", *words).stdout) == shown
        assert kv.read_text() == KV
    assert "page_size = 16" in command("config", "show", str(kv), "--json", str(out)).stdout
    assert json.loads(out.read_text()) == shown
    assert json.loads(command("config", "schema", "--json", str(out)).stdout) == json.loads(out.read_text())
    answer = json.loads(command("config", "check", str(kv), "--json").stdout)
    assert (answer["file"], answer["ok"], answer["problems"]) == (str(kv), True, [])
    kv.write_text("nonsense = 3\n" + KV)
    said = command("config", "check", str(kv), "--json", status=1)
    problems = json.loads(said.stdout)["problems"]
    assert [f"asynccache: {problem}" for problem in problems] == said.stderr.splitlines() != []


@pytest.mark.parametrize("name", program.COMMANDS)
def test_json_has_one_grammar(name: str) -> None:
    options = import_module(f"asynccache.cli.{program.COMMANDS[name][0]}").Options
    extra = options.fields(name)["json"].extra
    assert (extra["metavar"], extra["const"]) == ("PATH|-", "-")
