"""The images, the unit and the pods that run the host process and the server."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai_server
import pytest

from asynccache.cli.engine_line import engine_line
from asynccache.cli.serve import Options
from tests.host.host_kit import socket_path
from tests.processes import ROOT, Running, program
from tests.stores.server import free_port
from tests.waiting import wait_until

# The host process as a unit, in a container and on Kubernetes: ``asynccache serve`` understands what they run it with,
# they give it the memory that is charged to it, and engines get the folder of its socket.


FOLDER = ROOT / "examples" / "host"
UNIT = FOLDER / "asynccache@.service"
IMAGE = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
MORE = 256 << 20
"""What the process needs beside ``--memory``, at the least."""


def options(words: Sequence[str]) -> Options:
    """What ``asynccache serve`` makes of these words."""
    parser = argparse.ArgumentParser()
    Options.add_arguments(parser, "serve")
    return Options.read("serve", vars(parser.parse_args(words)))


def bytes_of(text: str) -> int:
    """A size as systemd (66G, of 1024) and Kubernetes (66Gi) write it."""
    number = text.rstrip("Gi")
    assert text.removeprefix(number) in ("G", "Gi")
    return int(number) << 30


def mounted(path: str, mounts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mount that is the folder of ``path``."""
    (found,) = (mount for mount in mounts if mount["mountPath"] == str(Path(path).parent))
    return found


# systemd


def unit() -> dict[str, list[str]]:
    """The settings of the unit by name."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def started() -> list[str]:
    """The words after ``asynccache serve``."""
    (line,) = unit()["ExecStart"]
    program, *words = shlex.split(line)
    assert (Path(program).name, words[0]) == ("asynccache", "serve")
    return words[1:]


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    asynccache = tmp_path / "asynccache"
    asynccache.write_text("#!/bin/sh\n")
    asynccache.chmod(0o755)
    (tmp_path / UNIT.name).write_text(UNIT.read_text().replace("/usr/local/bin/asynccache", str(asynccache)))
    said = program("systemd-analyze", "verify", tmp_path / "asynccache@a.service")
    assert said.returncode == 0, said.stderr
    assert "asynccache" not in said.stderr, "what it ignores it only says"


def test_the_unit_has_room_for_its_memory_and_time_to_end() -> None:
    settings, asked = unit(), options(started())
    assert bytes_of(settings["MemoryMax"][0]) >= asked.memory + MORE
    assert asked.path.startswith(f"/run/{settings['RuntimeDirectory'][0]}/")
    assert f"file:/var/lib/{settings['StateDirectory'][0]}/" in asked.storage[0]
    assert asked.group == settings["SupplementaryGroups"][0]
    assert (asked.replace, settings["RuntimeDirectoryPreserve"]) == (True, ["yes"]), "so that @b can follow @a"
    assert int(settings["TimeoutStopSec"][0]) > 30


def test_the_second_instance_follows_the_first(tmp_path: Path) -> None:
    """The unit's own command, twice, with other paths, another size and a group that is there."""
    path = socket_path()
    asked = options(started())
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]     # the first may listen for a moment longer
    other = {asked.listen: f"unix:{path}", "64GiB": "24MiB", asked.group: str(os.getegid()),
             asked.storage: f"file:{tmp_path}/kv?capacity=64MiB"}  # fmt: skip
    words = [[other.get(word, word) if word != asked.metrics else address for word in started()]
             for address in addresses]  # fmt: skip
    with Running("-m", "asynccache", "serve", *words[0]) as first:
        wait_until(lambda: healthy(addresses[0]))
        with Running("-m", "asynccache", "serve", *words[1]) as second:
            assert first.ended().returncode == 0
            wait_until(lambda: healthy(addresses[1]))
            assert second.ended(signal.SIGTERM).returncode == 0
    assert not Path(path).exists()


def healthy(address: str) -> bool:
    """Whether somebody listens at ``address``, who says that it is well."""
    try:
        with urlopen(f"http://{address}/healthz", timeout=5) as answer:
            assert answer.read() == b"ok\n"
            return True
    except OSError:
        return False


# the image


def entry() -> list[str]:
    """The words after ``asynccache serve`` that the image always has."""
    (line,) = (line for line in IMAGE if line.startswith("ENTRYPOINT "))
    program, command, *words = json.loads(line.removeprefix("ENTRYPOINT "))
    assert (program, command) == ("asynccache", "serve")
    return list(words)


def test_the_image_has_what_the_host_process_needs() -> None:
    copied = {word for line in IMAGE if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / each).exists() for each in copied)
    assert {"asynccache", "backends", "scheduler_shim"} <= copied
    assert {"README.md", "LICENSE", "pyproject.toml", "hatch_build.py"} <= copied, "what a build reads"
    (shown,) = (line for line in IMAGE if "docker run --rm" in line)
    before, _, after = shown.partition("asynccache-host ")
    asked = options([*entry(), *after.split()])
    volumes = [word.split(":")[1] for word in before.split() if word.startswith("/")]
    assert [str(Path(asked.path).parent), "/var/kv"] == volumes
    limit = before.split("--memory ")[1].split()[0]
    assert int(limit.removesuffix("g")) << 30 >= asked.memory + MORE


# Kubernetes


def manifests() -> list[dict[str, Any]]:
    """The objects of the file."""
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def test_a_machine_s_pod_has_the_memory_that_is_charged_to_it() -> None:
    daemons, _ = manifests()
    assert (daemons["apiVersion"], daemons["kind"]) == ("apps/v1", "DaemonSet")
    template = daemons["spec"]["template"]
    assert daemons["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert "maxSurge" not in daemons["spec"]["updateStrategy"]["rollingUpdate"]
    pod = template["spec"]
    (container,) = pod["containers"]
    asked = options([*entry(), *container["args"]])
    for kind in ("requests", "limits"):
        assert bytes_of(container["resources"][kind]["memory"]) >= asked.memory + MORE
    assert int(asked.group or "") in pod["securityContext"]["supplementalGroups"]
    assert pod["terminationGracePeriodSeconds"] > 30
    (port,) = container["ports"]
    assert asked.metrics == f"0.0.0.0:{port['containerPort']}"
    assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    folder = mounted(asked.path, container["volumeMounts"])
    assert volumes[folder["name"]]["hostPath"]["type"] == "DirectoryOrCreate"
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()


def test_an_engine_s_pod_has_the_folder_of_the_socket() -> None:
    daemons, engine = manifests()
    assert (engine["apiVersion"], engine["kind"]) == ("v1", "Pod")
    pod, there = engine["spec"], daemons["spec"]["template"]["spec"]
    assert pod["securityContext"]["supplementalGroups"] == there["securityContext"]["supplementalGroups"]
    (container,) = pod["containers"]
    (line,) = container["args"]
    given = json.loads(line)
    assert given == json.loads(engine_line("vllm", ["host:/run/asynccache/kv.sock"], 4 << 30, None, None).text)
    (tier,) = given["kv_connector_extra_config"]["secondary_tiers"]
    scheme, _, path = tier["storage"].partition(":")
    assert scheme == "host"
    folder = mounted(path, container["volumeMounts"])
    assert folder["readOnly"] is True
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    served = {volume["name"]: volume for volume in there["volumes"]}
    assert volumes[folder["name"]]["hostPath"]["path"] == served["socket"]["hostPath"]["path"]


# The image of the example server: the files that it copies exist, and the server takes the options that it is run
# with.


LINES = (ROOT / "examples" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def test_what_it_copies_is_all_that_is_installed() -> None:
    copied = {word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / each).exists() for each in copied)
    packages = re.findall(r'packages = \[(.*?)\]', (ROOT / "pyproject.toml").read_text(), re.DOTALL)[0]
    assert {name.split("/")[0] for name in re.findall(r'"(.*?)"', packages)} <= copied
    assert {"README.md", "LICENSE", "pyproject.toml", "hatch_build.py"} <= copied, "what a build reads"


def test_what_it_runs_is_understood() -> None:
    (entry,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in LINES if line.startswith("ENTRYPOINT "))
    assert entry[:2] == ["python", "examples/openai_server.py"]
    (shown,) = (line.partition("asynccache-server ")[2] for line in LINES if "docker run" in line)
    args = openai_server.arguments([*entry[2:], *shown.replace("'", "").split()])
    assert (args.host, args.port, args.storage) == ("0.0.0.0", 8000, "file:/var/kv?capacity=10GiB")
    assert f"EXPOSE {args.port}" in LINES
