"""Programs beside vLLM's own: the example as a reader runs it, and ``asynccache verify-engine``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from asynccache.cli.engine_doctor import examine_engine
from asynccache.cli.engine_line import engine_line
from asynccache.cli.main import main
from tests.stores.server import free_port
from tests.vllm.engine_kit import EXAMPLES, STARTS_WITHIN, installed, write_model

pytestmark = pytest.mark.skipif(not installed(), reason='vLLM is not installed: make test-vllm')

# ``asynccache verify-engine`` on vLLM's own server, with our tier: every tier is right, and a wrong copy is found.


ROOT = EXAMPLES.parent
FLUSHES = ("--flush-device", "/reset_prefix_cache", "--flush-host", "/reset_prefix_cache?reset_external=true")


@contextmanager
def serving(folder: Path, spec: str, module: str) -> Iterator[str]:
    """vLLM's server with our tier, by the line that ``config vllm`` prints, and a host tier that works on a CPU."""
    from tests.examples.checkpoints import byte_level

    model, port, words = folder / "model", free_port(), byte_level()
    write_model(model, "llama", vocab_size=len(words))
    words.save_pretrained(model)
    line = json.loads(engine_line("vllm", [f"file:{folder}/kv?capacity=128MiB&segment=8MiB"], 1 << 30, None, None).text)
    line["kv_connector_extra_config"] |= {"spec_name": spec, "spec_module_path": module, "cpu_bytes_to_use": 32 << 20}
    options = ["--model", str(model), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port),
               "--enforce-eager", "--dtype", "float32", "--block-size", "32",
               "--max-model-len", "2048", "--max-num-seqs", "8", "--enable-prompt-tokens-details",
               "--kv-transfer-config", json.dumps(line)]  # fmt: skip
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1",
                                "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{ROOT}"}  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options], stdout=log,
                                   stderr=log, env=environment, start_new_session=True)  # fmt: skip
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 2 * STARTS_WITHIN
        while not _healthy(url):
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() < end, (folder / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in re.findall(r"/dev/shm/vllm_offload_[-\w]+\.mmap", (folder / "log").read_text()):
            Path(path).unlink(missing_ok=True)


def _healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def verdicts(url: str, folder: Path) -> dict[str, Any]:
    report = folder / "report.json"
    main(["verify-engine", url, "--prompts", "6", "--timeout", "300", "--json", str(report), *FLUSHES])
    return {tier["tier"]: tier["verdict"] for tier in json.loads(report.read_text())["tiers"]}


@pytest.mark.slow(120)
def test_the_doctor_finds_that_this_vllm_fits(tmp_path: Path) -> None:
    report = examine_engine("vllm", [f"file:{tmp_path}/kv?capacity=64MiB"], 1, lambda line: None)
    assert report["error"] is None


@pytest.mark.slow(120)
def test_every_tier_of_vllm_is_right(tmp_path: Path) -> None:
    with serving(tmp_path, "CpuTieringSpec", "vllm_on_cpu.offload") as url:
        assert verdicts(url, tmp_path) == dict.fromkeys(("new", "device", "turns", "host", "storage"), "right")


@pytest.mark.slow(120)
def test_layers_that_vllm_copies_to_the_wrong_place_are_found(tmp_path: Path) -> None:
    with serving(tmp_path, "WrongTieringSpec", "tests.vllm.wrong_copies") as url:
        found = verdicts(url, tmp_path)
    assert (found["new"], found["host"], found["storage"]) == ("right", "wrong", "wrong")
    assert found["device"] == "wrong"  # of a prompt that ends on a block's end, vLLM takes the last block from the host


# ``examples/vllm_second_run.py`` as a reader runs it: twice.


LINE = re.compile(r"^(.+): +first token after +(\d+) ms, (\d+) of 4097 tokens cached$", re.MULTILINE)


def run(folder: Path) -> dict[str, tuple[int, int]]:
    """Milliseconds and cached tokens, by where vLLM had the prompt."""
    command = [sys.executable, str(EXAMPLES / "vllm_second_run.py"), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * STARTS_WITHIN, cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "run this again" in done.stdout
    return {where: (int(seconds), int(cached)) for where, seconds, cached in LINE.findall(done.stdout)}


@pytest.mark.slow(90)
def test_the_second_run_finds_what_the_first_computed(tmp_path: Path) -> None:
    first, second = run(tmp_path / "example"), run(tmp_path / "example")
    emptied, nothing = "vLLM's memory emptied", "nothing in vLLM's memory"
    assert list(first) == list(second) == [nothing, "on the device", emptied]
    assert [cached for _, cached in first.values()] == [0, 4096, 4096]
    assert [cached for _, cached in second.values()] == [4096, 4096, 4096]
    assert second[nothing][0] < first[nothing][0], "it was not computed"
