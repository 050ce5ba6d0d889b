"""``asynccache verify-engine``."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import openai_server
import openai_serving.paths
import torch
import uvicorn
from asynccache_shim import Batch
from openai_serving.app import build
from openai_serving.models import FAMILIES
from openai_serving.protocol import ApiError, ParsedRequest, Prompt
from openai_serving.scores import ScoredModel
from openai_serving.service import Choices, Service, ServiceParts

from asynccache.cli.main import main
from asynccache.cli.openai_client import Completion, Difference, EngineError, apart
from asynccache.cli.verify_engine import Options, Verification
from asynccache.memory.mover import Mover
from asynccache.storage import CheckedStore, Result
from tests.examples.server_kit import WORDS
from tests.processes import PATHS, Running
from tests.stores.server import free_port
from tests.waiting import wait_until

# ``asynccache verify-engine``: right servers pass, and wrong ones are found, each by the name of the tier.
#
# The servers are the example server with real small models, in a thread of this process. What makes one wrong is what
# has made engines wrong: a layer in another's place, a page in another's place, a state that is out of date, a byte,
# and KV of another adapter.


torch.set_num_threads(1)

DEVICE, HOST = 1024, 4096
"""Room in tokens."""


def parts(family: str = "qwen3", *more: str, device: int = DEVICE) -> ServiceParts:
    """The parts of a server whose device and host memory are small."""
    words = ("--device-tokens", str(device), "--host-tokens", str(HOST), "--model-family", family)
    return openai_server.served(openai_server.arguments([*words, *(more or ("--storage", "memory:"))]))


@contextmanager
def serving(planned: ServiceParts, kind: type[Service] = Service) -> Iterator[str]:
    """A server, and its address."""
    listens, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with kind(planned) as service:
            server = uvicorn.Server(uvicorn.Config(build(service), port=0, log_level="critical", lifespan="off"))
            running = asyncio.create_task(server._serve())
            while not server.started:  # noqa: ASYNC110  uvicorn sets no asyncio.Event
                await asyncio.sleep(0.01)
            found.extend((asyncio.get_running_loop(), server.servers[0].sockets[0].getsockname()[1]))
            listens.set()
            await stop.wait()
            server.should_exit = True
            await running

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            listens.set()

    thread = threading.Thread(target=run, name="engine-server")
    thread.start()
    listens.wait()
    assert len(found) == 2, found
    try:
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        found[0].call_soon_threadsafe(stop.set)
        thread.join()


FEW = ("--prompts", "6", "--length", "160", "--new-tokens", "8", "--at-once", "3", "--pause", "0.2")
FLUSHES = ("--flush-device", str(DEVICE), "--flush-host", str(DEVICE + HOST + 1024))


class Verified(NamedTuple):
    """What came of the command. ``verdicts``: by tier."""

    status: int
    report: dict[str, Any]
    printed: str
    verdicts: dict[str, str]


Verify = Callable[..., Verified]
"""What the fixture ``verify`` is."""


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Runs the command on a server of these parts, or at this address."""

    def done(server: ServiceParts | str, *options: str, kind: type[Service] = Service) -> Verified:
        file = tmp_path / "report.json"
        with nullcontext(server) if isinstance(server, str) else serving(server, kind) as url:
            status = main(["verify-engine", url, "--json", str(file), *FEW, *options])
        report = json.loads(file.read_text())
        verdicts = {tier["tier"]: tier["verdict"] for tier in report["tiers"]}
        return Verified(status, report, capsys.readouterr().out, verdicts)

    return done


TIERS = ("new", "device", "turns", "host", "storage")
RIGHT = dict.fromkeys(TIERS, "right")


@pytest.mark.slow(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_server_passes(family: str, verify: Verify) -> None:
    status, report, printed, verdicts = verify(parts(family), *FLUSHES)
    assert (status, verdicts) == (0, RIGHT), printed
    assert (report["cache_salt"], report["page_size"], report["cold_runs_differ_by"] < 1e-3) == (True, 16, True)
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert printed.endswith("right: answers from every tier are those of the cold server\n")
    tiers = {tier["tier"]: tier for tier in report["tiers"]}
    assert tiers["device"]["prompts"] == tiers["device"]["prompts_hit"] == 6
    assert tiers["new"]["tokens_hit"] == 0
    for name in ("device", "host", "storage"):
        assert tiers[name]["hits_by_tier"][name] > tiers[name]["tokens_hit"] / 2


# servers that are wrong

Spoil = Callable[[npt.NDArray[np.uint8]], None]
"""Changes pages, ``[pages, layers, bytes]``, in place."""


def swap_layers(pages: npt.NDArray[np.uint8]) -> None:
    pages[:, [0, 1]] = pages[:, [1, 0]]


def shift_pages(pages: npt.NDArray[np.uint8]) -> None:
    """Each page is the one before it. (Pages that only change places change nothing: a key knows its position.)"""
    pages[1:] = pages[:-1].copy()


def flip_a_byte(pages: npt.NDArray[np.uint8]) -> None:
    pages[-1, 0, 3] ^= 0xFF  # of a float's sign and exponent


def load_wrongly(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """Each load from host memory to the device brings what ``spoil`` makes of the pages."""
    load = Mover.load

    def wrong(self: Mover, moves: Sequence[Any], after: Sequence[Any] = ()) -> Any:
        kept = []
        for copy in self._copies(moves):
            if copy.host is not None:
                kept.append((copy.host, copy.src, copy.host.array[copy.src]))
                pages = copy.host.array[copy.src]
                spoil(pages)
                copy.host.array[copy.src] = pages
        events = load(self, moves, after)
        while not events.done.done():
            time.sleep(0.001)
        for host, slots, pages in kept:
            host.array[slots] = pages
        return events

    monkeypatch.setattr(Mover, "load", wrong)


def mix_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is in another's place on the device."""
    begun, forward = set[int](), ScoredModel.forward

    def wrong(self: ScoredModel, batch: Batch) -> list[int]:
        chunks = []
        for chunk in batch.chunks:
            hit = chunk.start // 16 if chunk.request_id not in begun else 0
            begun.add(chunk.request_id)
            pages = chunk.pages.copy()
            pages[1:hit] = chunk.pages[: max(0, hit - 1)]
            chunks.append(chunk._replace(pages=pages))
        return forward(self, batch._replace(chunks=tuple(chunks)))

    monkeypatch.setattr(ScoredModel, "forward", wrong)


def take_no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is out of date: its slot holds what it held before."""
    forward = ScoredModel.forward

    def wrong(self: ScoredModel, batch: Batch) -> list[int]:
        return forward(self, batch._replace(chunks=tuple(chunk._replace(checkpoint=None) for chunk in batch.chunks)))

    monkeypatch.setattr(ScoredModel, "forward", wrong)


def get_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without checksums: the byte is wrong behind ours."""
    get = CheckedStore.get

    async def wrong(self: CheckedStore, keys: Sequence[Any], payloads: Sequence[memoryview]) -> list[Result]:
        results = await get(self, keys, payloads)
        for result, payload in zip(results, payloads, strict=True):
            if result is Result.HIT:
                flip_a_byte(np.frombuffer(payload, np.uint8).reshape(1, 1, -1))
        return results

    monkeypatch.setattr(CheckedStore, "get", wrong)


TO_HOST = {"new": "right", "device": "right", "turns": "right", "host": "wrong"}


@pytest.mark.slow(4)
@pytest.mark.parametrize(("fault", "family", "flushes", "wanted"), [
    pytest.param(*row, id=name) for name, row in {
        "layers": (partial(load_wrongly, spoil=swap_layers), "qwen3", FLUSHES[:2], TO_HOST),
        "pages": (partial(load_wrongly, spoil=shift_pages), "qwen3", FLUSHES[:2], TO_HOST),
        "byte": (partial(load_wrongly, spoil=flip_a_byte), "qwen3", FLUSHES[:2], TO_HOST),
        "device": (mix_pages, "qwen3", (), {"new": "right", "device": "wrong", "turns": "wrong"}),
        "state": (take_no_checkpoints, "falcon_h1", (), {"new": "right", "device": "wrong"}),
        "states": (take_no_checkpoints, "qwen3_next", (), {"new": "right", "device": "wrong"}),
        "store": (get_wrongly, "qwen3", FLUSHES, RIGHT | {"storage": "wrong"}),
    }.items()
])  # fmt: skip
def test_a_server_that_is_wrong_is_found_and_its_tier_named(
    fault: Callable[[pytest.MonkeyPatch], None], family: str, flushes: tuple[str, ...], wanted: dict[str, str],
    monkeypatch: pytest.MonkeyPatch, verify: Verify,
) -> None:  # fmt: skip
    fault(monkeypatch)
    status, report, printed, verdicts = verify(parts(family), *flushes)
    assert (status, verdicts | wanted) == (1, verdicts), printed
    if wanted is TO_HOST:
        assert printed.endswith("wrong from: host\n")
        first = report["tiers"][-1]["first"]
        assert first["position"] >= first["prompt_tokens"] > first["cached_tokens"] > 0
        assert f"host: the first difference is at token {first['position']}, in page {first['page']}:" in printed


@pytest.mark.slow
def test_the_page_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, verify: Verify) -> None:
    """The last page of a load has a wrong byte, so a prompt that ends before it is right."""
    load_wrongly(monkeypatch, flip_a_byte)
    first = verify(parts(), "--flush-device", str(DEVICE), "--prompts", "1").report["tiers"][-1]["first"]
    assert first["kv_page"] == first["cached_tokens"] // 16 - 1


ADAPTERS = ("a", "b")


class Adapting(Service):
    """A server of two adapters of one model. ``apart``: whether their KV is kept apart."""

    apart = True

    def check_model(self, name: str) -> None:
        assert name in ADAPTERS

    def generate(self, ask: ParsedRequest, tokens: list[int]) -> Choices:
        """Mark the request with its adapter, in an option that greedy requests do not use."""
        salt = f"{ask.model}/{ask.cache_salt}" if self.apart else ask.cache_salt
        sampling = ask.sampling._replace(top_k=ADAPTERS.index(ask.model))
        return super().generate(replace(ask, cache_salt=salt, sampling=sampling), tokens)


class Mixing(Adapting):
    """The same, and wrong: what one adapter computed is found by the other."""

    apart = False


class AdaptedModel(ScoredModel):
    """A model whose second adapter is a changed matrix."""

    def forward(self, batch: Batch) -> list[int]:
        found: dict[int, int] = {}
        weight = self._model.model.layers[0].self_attn.v_proj.weight.data
        plain = weight.clone()
        for adapter in range(len(ADAPTERS)):
            chunks = tuple(chunk for chunk in batch.chunks if chunk.sampling.top_k == adapter)
            weight.copy_(plain * (1 - 2 * adapter))
            made = super().forward(Batch(chunks, () if adapter else batch.ended))
            found |= zip((chunk.request_id for chunk in chunks), made, strict=True)
        weight.copy_(plain)
        return [found[chunk.request_id] for chunk in batch.chunks]


@pytest.mark.slow(6)
def test_the_kv_of_another_adapter_is_found(monkeypatch: pytest.MonkeyPatch, verify: Verify) -> None:
    monkeypatch.setattr(openai_serving.paths, "ScoredModel", AdaptedModel)
    models = ("--model", "a", "--model", "b")
    right = verify(parts(), *models, kind=Adapting)
    assert right.status == 0, right.report
    status, report, _, verdicts = verify(parts(), *models, kind=Mixing)
    assert (status, verdicts["new"]) == (1, "wrong")
    assert {report["tiers"][0]["first"]["model"]} <= {"a", "b"}
    assert any("another model or adapter" in note for note in report["notes"])


# ``asynccache verify-engine`` and servers that are not like ours: without salts, unsteady, silent, or no servers.


class Unsalted(Service):
    """A server that ignores salts, as those do whose connector has keys of its own."""

    def generate(self, ask: ParsedRequest, tokens: list[int]) -> Choices:
        return super().generate(replace(ask, cache_salt=None), tokens)


class Refusing(Service):
    """A server that refuses salts, and has no tokenizer to ask."""

    def generate(self, ask: ParsedRequest, tokens: list[int]) -> Choices:
        if ask.cache_salt is not None:
            raise ApiError(400, "unknown parameter: cache_salt", param="cache_salt")
        return super().generate(ask, tokens)

    async def tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            raise ApiError(404, "there is nothing of this name")
        return await super().tokens(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Unsalted, Refusing])
def test_a_server_without_salts_is_verified_as_far_as_that_goes(kind: type[Service], verify: Verify) -> None:
    status, report, printed, verdicts = verify(parts(), *FLUSHES, kind=kind)
    assert (status, verdicts) == (0, dict.fromkeys(("device", "host", "storage"), "right")), printed
    assert not report["cache_salt"]
    assert "does not keep prompts apart by cache_salt" in printed.replace("\n", " ")
    assert ("has no /tokenize" in printed) is (kind is Refusing)


def disturb(monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """The server's logits are off by something else each time, as those of a GPU are that adds in any order."""
    compute = ScoredModel.compute_all

    def noisy(self: ScoredModel, *given: Any) -> list[torch.Tensor]:
        self._made = [logits + nats * torch.randn_like(logits) for logits in compute(self, *given)]
        return self._made

    monkeypatch.setattr(ScoredModel, "compute_all", noisy)


@pytest.mark.slow
def test_what_two_cold_runs_differ_by_is_allowed(monkeypatch: pytest.MonkeyPatch, verify: Verify) -> None:
    disturb(monkeypatch, 0.03)
    status, report, _, _ = verify(parts(), *FLUSHES)
    assert status == 0, report
    assert 0.03 < report["cold_runs_differ_by"] < 0.3
    assert report["allowed"] == pytest.approx(3 * report["cold_runs_differ_by"])


def test_a_server_whose_cold_runs_disagree_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(monkeypatch, 20.0)
    with serving(parts()) as url:
        said = refused(url, *FEW)
    assert "prompts were more than 1 nats apart, so its answers say nothing about its cache" in said


@pytest.mark.slow
def test_a_tier_that_gave_nothing_is_not_called_right(verify: Verify) -> None:
    """There is no storage here, so that what left the host's memory is gone."""
    status, _, printed, verdicts = verify(parts("qwen3", "--storage", "none"), "--flush-host", FLUSHES[3])
    assert (status, verdicts["storage"]) == (1, "not hit")
    assert printed.endswith("no hit from: storage\n")


@pytest.mark.slow(4)
def test_a_flush_is_a_command_or_a_post(tmp_path: Path, verify: Verify) -> None:
    """The command leaves something running with its output open; nothing waits for that. /tokenize takes any POST."""
    with serving(parts()) as url:
        began = time.monotonic()
        flushed = verify(url, "--flush-device", f"touch {tmp_path}/flushed; sleep 30 & true")
        assert (flushed.status, time.monotonic() - began < 25) == (0, True)
        assert (tmp_path / "flushed").exists()
        for how, said in (("exit 3", "'exit 3' failed with status 3: it says nothing"),
                          ("echo no such unit >&2; false", "failed with status 1: no such unit"),
                          ("/nowhere", "POST /nowhere answers 404"), (f"{url}/nowhere?a=1", "nowhere?a=1 answers 404"),
                          ("http://127.0.0.1:1/", "POST http://127.0.0.1:1/:"),
                          ("sleep 30", "longer than 1 s")):  # fmt: skip
            assert said in refused(url, "--flush-device", how, "--wait", "1", *FEW, "--prompts", "1")


def refused(*arguments: str) -> str:
    """The one sentence with which the command ends, and what else it printed."""
    said = StringIO()
    with redirect_stderr(said):
        assert main(["verify-engine", *arguments]) == 2
    return said.getvalue()


@contextmanager
def saying(answers: Mapping[str, bytes], *, patience: float = 0, heard: list[bytes] | None = None) -> Iterator[str]:
    """Something that listens, reads a request, answers by its path, and closes the connection. ``heard``: where the
    requests go."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    request = connection.recv(1 << 16)
                    if heard is not None:
                        heard.append(request)
                    path = request.split()[1].decode()
                    time.sleep(patience)
                    connection.sendall(answers.get(path, b""))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def told(body: object, *, chunked: bool = False) -> bytes:
    content = json.dumps(body).encode()
    if chunked:
        half = len(content) // 2
        parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (content[:half], content[half:], b""))
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + parts
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)


CARD = told({"data": [{"id": "m"}]})
BARE = {"choices": [{"text": "x", "logprobs": None}], "usage": {"prompt_tokens": 3}}
SCORES = {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [{"x": -1.0}]}
FULL = {"choices": [{"text": "x", "logprobs": SCORES}], "usage": {"prompt_tokens": 3, "prompt_tokens_details": None}}


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({}, "does not answer"),
        ({"/v1/models": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello"}, "does not answer"),
        ({"/v1/models": b"220 smtp.example ESMTP\r\n\r\n"}, "it speaks no HTTP/1.1"),
        ({"/v1/models": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"}, "its answer has 99999999999 bytes"),
        ({"/v1/models": b"HTTP/1.1 200 OK\r\n\r\n<html>"}, "answers 200: <html>"),
        ({"/v1/models": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"}, "does not answer"),
        ({"/v1/models": told({"data": []})}, "/v1/models names no model"),
        ({"/v1/models": told([1])}, "/v1/models names no model"),
        ({"/v1/models": CARD}, "does not answer"),
        ({"/v1/models": CARD, "/v1/completions": told(BARE)}, "without log-probabilities or usage"),
        ({"/v1/models": CARD, "/v1/completions": told(FULL)}, "vLLM tells hits with --enable-prompt-tokens-details"),
        ({"/v1/models": CARD, "/v1/completions": told(FULL, chunked=True)}, "no cached tokens"),
        ({"/v1/models": CARD, "/v1/completions": b"HTTP/1.1 401 No\r\n\r\n{\"error\": {\"message\": \"a key\"}}"},
         "answers 401: a key"),
    ],
)  # fmt: skip
def test_what_is_no_such_server_is_said_in_a_sentence(answers: Mapping[str, bytes], sentence: str) -> None:
    with saying(answers) as url:
        said = refused(url, "--pause", "0", "--timeout", "20")
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_server_that_is_silent_or_busy_is_not_waited_for_longer_than_asked() -> None:
    with saying({}, patience=1.5) as url:
        assert "does not answer within 0.5 s" in refused(url, "--timeout", "0.5")
    with saying({"/v1/models": b"HTTP/1.1 503 Busy\r\n\r\n{}"}) as url:
        assert "does not answer within 1 s" in refused(url, "--timeout", "1")


def test_the_key_is_sent_to_the_server_and_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    hit = told({"choices": [{"text": "x", "logprobs": SCORES}],
                "usage": {"prompt_tokens": 99, "prompt_tokens_details": {"cached_tokens": 64}}})  # fmt: skip
    own, others = list[bytes](), list[bytes]()
    with saying({"/v1/models": CARD, "/v1/completions": hit}, heard=own) as url, saying({}, heard=others) as other:
        refused(url, "--pause", "0", "--wait", "1")
        verification = Verification(Options(url=url, pause=0.0, wait=1.0), lambda line: None)
        with pytest.raises(EngineError):
            asyncio.run(verification._flush("host", f"{other}/flush"))
    assert all(b"Authorization: Bearer hunter2" in request for request in own)
    assert [b"hunter2" in request for request in others] == [False]


@pytest.mark.slow
def test_a_flood_of_any_size_begins_at_once() -> None:
    """Nothing of it is made before it is sent."""
    lines = list[str]()
    with serving(parts()) as url:
        verification = Verification(Options(url=url, pause=0.0), lines.append)

        async def begin() -> None:
            await verification._look()
            async with asyncio.timeout(2):
                await verification._flush("host", str(10**15))

        with pytest.raises(TimeoutError):
            asyncio.run(begin())
    assert re.fullmatch(r"host: other prompts: [\d,]+ of [\d,]+ prompts", lines[-1])


@pytest.mark.slow
def test_conversations_end_where_the_context_does(verify: Verify) -> None:
    with serving(parts(device=512)) as url:
        assert "are more than the server's context of 512 tokens" in refused(url, "--length", "508")
        status, report, _, _ = verify(url, "--length", "64", "--new-tokens", "200", "--prompts", "1")
    assert status == 0, report
    [turns] = [tier for tier in report["tiers"] if tier["tier"] == "turns"]
    assert 0 < turns["prompts"] < 6


@pytest.mark.slow
def test_after_a_restart_prompts_come_from_storage(tmp_path: Path, verify: Verify) -> None:
    """The server in a process of its own, which a command restarts, as an operator's would."""
    port = free_port()
    server = [sys.executable, *WORDS, "--storage", f"file:{tmp_path}/kv?capacity=64MiB&segment=8MiB", "--port",
              str(port), "--device-tokens", str(DEVICE), "--host-tokens", str(DEVICE)]  # fmt: skip
    script = tmp_path / "restart.py"
    script.write_text(f"""
import os, signal, socket, subprocess, sys, time
pid = {str(tmp_path / "pid")!r}
if os.path.exists(pid):
    os.kill(int(open(pid).read()), signal.SIGTERM)
    while not socket.socket().connect_ex(("127.0.0.1", {port})):
        time.sleep(0.05)
    time.sleep(0.5)
server = subprocess.Popen({server!r}, stdout=subprocess.PIPE, stderr=open({str(tmp_path / "log")!r}, "a"),
                          start_new_session=True, env=os.environ | {PATHS!r})
open(pid, "w").write(str(server.pid))
server.stdout.readline()
""")
    restart = f"{sys.executable} {script}"
    try:
        subprocess.run(restart, shell=True, check=True)
        status, report, printed, verdicts = verify(f"http://127.0.0.1:{port}/v1", "--restart", restart)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    assert (status, verdicts["restart"]) == (0, "right"), printed
    tiers = {tier["tier"]: tier for tier in report["tiers"]}
    assert tiers["restart"]["hits_by_tier"]["storage"] == tiers["restart"]["tokens_hit"] > 0


@pytest.mark.slow(4)
def test_ctrl_c_ends_it_and_the_command_that_it_runs(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    asked = ("-m", "asynccache", "verify-engine", *FEW, "--flush-device", f"echo $$ > {shell}; sleep 600")
    with serving(parts()) as url, Running(*asked, url) as command:
        wait_until(lambda: shell.exists() and shell.read_text())
        time.sleep(2.5)  # what takes longer than two seconds says how far it is
        done = command.ended(signal.SIGINT)
    assert (done.returncode, "Traceback" in done.stderr, ": " in done.stderr) == (130, False, True)
    group = int(shell.read_text())
    fields = [stat.read_text().rpartition(")")[2].split() for stat in Path("/proc").glob("[0-9]*/stat")]
    assert not [state for state, _, its, *_ in fields if int(its) == group and state != "Z"]


# how far two answers are apart


def said(*tokens: tuple[str, float, dict[str, float]]) -> Completion:
    return Completion([t for t, _, _ in tokens], [p for _, p, _ in tokens], [top for _, _, top in tokens], "", 9, 0, {})


def test_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    a, b = ("a", -0.5, {"a": -0.5, "b": -1.5}), ("b", -0.9, {"b": -0.9, "a": -1.0})
    assert apart(said(a, b), said(a, b)) == Difference(0.0, None)
    assert apart(said(a), said(("a", -0.7, {"a": -0.7, "c": -3.0}))).nats == pytest.approx(0.2)
    assert apart(said(a), said(b)) == Difference(1.0, None)  # a was preferred by 1 nat
    assert apart(said(a), said(b), 0.9) == Difference(1.0, 0)
    assert apart(said(b, a), said(a, b), 0.9).token is None  # a near tie, and nothing after it is compared
    assert apart(said(a, a), said(a), 5.0).token == 1  # one ended
    assert apart(said(a), said(("c", -0.1, {"c": -0.1})), 5.0).token == 0  # no token that both have
    assert apart(said(("a", -1.0, {"a": float("nan")})), said(a), 5.0).token == 0
    assert apart(said(("a", 0.0, {"a": 0.0, "b": float("-inf")})), said(("a", 0.0, {"a": 0.0, "b": float("-inf")}))
                 ) == Difference(0.0, None)  # fmt: skip
