"""A checkpoint on the example server: it says what transformers itself says, on every path, however many ask."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import openai_server
import pytest
from openai_serving.paths import PATHS

from asynccache.cli import explain
from asynccache.events import Mirror, Subscriber
from tests.examples.checkpoints import generated, loaded, prompt_tokens, said, write
from tests.examples.server_kit import PAGE, SOON, Server, running, settled
from tests.examples.test_example_server import cached, text_of
from tests.processes import ROOT, run

NAME = "small"
STORY = "The quick brown fox jumps over the lazy dog — 你好，世界 🦊. Prompts that share a prefix share its keys. " * 3
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=list(PATHS))
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("server")
    options = ("--model", str(folder), "--served-model-name", NAME, "--path", request.param, "--max-live", "256",
               "--device-tokens", "8192", "--host-tokens", "8192", "--kv-events", f"ipc://{place}/events",
               "--kv-events-replay", f"ipc://{place}/again", "--kv-events-topic", "kv")  # fmt: skip
    with running(*options) as server:
        server.path, server.place = request.param, place
        yield server


def messages(text: str) -> Any:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


async def test_it_says_what_transformers_says(client: openai.AsyncOpenAI, folder: Path) -> None:
    """In one piece or in many, with a hit and without; ``usage`` says what was one."""
    talk = messages("Says what? " + STORY)
    tokens = prompt_tokens(folder, talk)
    for hit in (0, (len(tokens) - 1) // PAGE * PAGE):
        answer = await client.chat.completions.create(**GREEDY, messages=talk, max_tokens=24)
        assert answer.choices[0].message.content == said(folder, talk, 24)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, cached(answer.usage)) == (len(tokens), hit)
        assert answer.usage.completion_tokens == len(generated(folder, talk, 24))
    stream = await client.chat.completions.create(**GREEDY, messages=talk, max_tokens=24, stream=True,
                                                  stream_options={"include_usage": True})  # fmt: skip
    text, reason, usage = await text_of(stream)
    assert (text, reason) == (said(folder, talk, 24), "length")
    assert usage.prompt_tokens_details.cached_tokens_by_tier == {"device": hit, "host": 0, "storage": 0}
    answer = await client.completions.create(**GREEDY, prompt=STORY, max_tokens=24)
    assert answer.choices[0].text == said(folder, STORY, 24)
    answer = await client.completions.create(**GREEDY, prompt=prompt_tokens(folder, STORY), max_tokens=24)
    assert answer.choices[0].text == said(folder, STORY, 24)


async def test_a_stop_string_ends_it_wherever_tokens_do(client: openai.AsyncOpenAI, folder: Path) -> None:
    """However long its tokens are, nothing of it is shown."""
    whole = said(folder, STORY, 24)
    for stop in (whole[6:8], whole[9:14], whole[12]):
        stream = await client.completions.create(**GREEDY, prompt=STORY, max_tokens=24, stop=[stop], stream=True)
        assert (await text_of(stream))[:2] == (whole[: whole.index(stop)], "stop")


async def test_several_answers_have_several_seeds(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "temperature": 1.2, "prompt": STORY, "max_tokens": 12}
    many = await client.completions.create(**asked, n=3, seed=5)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert len({choice.text for choice in many.choices}) == 3
    assert many.usage is not None
    assert many.usage.completion_tokens <= 36
    one = await client.completions.create(**asked, seed=6)
    assert one.choices[0].text == many.choices[1].text
    texts = ["", "", ""]
    async for chunk in await client.completions.create(**asked, n=3, seed=5, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in many.choices]


async def test_two_hundred_clients_have_their_answers(server: Server, client: openai.AsyncOpenAI, folder: Path) -> None:
    """And each its own error, if there is one: nobody else's answer is another one for it. Where requests are computed
    one after the other, forty of them do."""
    count = 32 if server.path == "prefix" else 192
    common: dict[str, Any] = {**GREEDY, "max_tokens": 4, "stream": True}
    asked = [{**common, "prompt": f"{STORY[: 60 + i % 5]} {i % 20}"} for i in range(count)]
    wrong: list[dict[str, Any]] = [
        {**GREEDY, "prompt": [100_000]}, {**GREEDY, "prompt": "a", "top_k": 3}, {**GREEDY, "prompt": "a" * 9000},
        {**GREEDY, "model": "other", "prompt": "a"}, {**GREEDY, "prompt": "a", "max_tokens": 2048},
    ]  # fmt: skip
    cold = [{**GREEDY, "temperature": 1e-300, "prompt": "Cold.", "max_tokens": 4, "top_p": 0.0}] * 3
    async with openai.DefaultAsyncHttpxClient(base_url=server.url, trust_env=False, timeout=60) as http:

        async def ask(body: dict[str, Any]) -> tuple[int, str]:
            answer = await http.post("/v1/completions", json=body)
            if not body.get("stream"):
                found = answer.json()
                return answer.status_code, found["choices"][0]["text"] if "choices" in found else found["error"]["type"]
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert lines[-1] == "[DONE]"
            return answer.status_code, "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

        answers = await asyncio.gather(*map(ask, [*asked, *wrong, *cold]))
    assert [status for status, _ in answers] == [200] * count + [400, 400, 400, 404, 400] + [200] * 3
    assert [text for _, text in answers[:count]] == [said(folder, body["prompt"], 4) for body in asked]
    assert {text for _, text in answers[count + 5 :]} == {said(folder, "Cold.", 4)}


async def test_a_client_that_leaves_ends_its_answer(client: openai.AsyncOpenAI) -> None:
    """Greedy, this answer has 715 tokens; one that is drawn could be over before its client has left."""
    before = (await settled(client))["requests"]["ended"].get("aborted", 0)
    stream = await client.completions.create(**GREEDY, prompt="Alone", max_tokens=2000, stream=True)
    await anext(aiter(stream))
    await stream.close()
    assert (await settled(client))["requests"]["ended"].get("aborted", 0) == before + 1


async def test_the_cache_explains_a_prompt(client: openai.AsyncOpenAI, server: Server, folder: Path) -> None:
    """To ``asynccache explain`` and to whoever asks with a text; and its figures are there."""
    talk = messages("Explained. " + STORY)
    await client.chat.completions.create(**GREEDY, messages=talk, max_tokens=1)
    async with openai.DefaultAsyncHttpxClient(base_url=server.url, trust_env=False) as http:
        tokens = (await http.post("/tokenize", json={"messages": talk})).json()["tokens"]
        assert tokens == prompt_tokens(folder, talk)
        found = await asyncio.to_thread(explain.ask, server.url, tokens, None)
        assert found["device"] == len(tokens) // PAGE * PAGE
        asked = (await http.post("/explain", json={"messages": talk})).json()
        listed = (await http.get("/explain", params={"tokens": ",".join(map(str, tokens))})).json()
        for answer in (found, asked, listed):          # but for what depends on when it was asked
            assert answer.pop("learned")["policy"] == "p2c"
            for span in answer["spans"]:
                span.pop("judged", None)
        assert found == asked == listed
        assert (await http.post("/explain", json={"tokens": [1], "prompt": "a"})).json() == {
            "error": "give one of tokens, prompt and messages, not tokens and prompt"
        }
        assert "asynccache_hit_tokens_total" in (await http.get("/metrics")).text
        assert (await http.get("/healthz")).json() == {"status": "ok"}


async def test_a_router_is_told_where_pages_are(client: openai.AsyncOpenAI, server: Server) -> None:
    before = await _told(server, 0)
    answer = await client.completions.create(**GREEDY, prompt="Told. " + STORY, max_tokens=1)
    assert answer.usage is not None
    pages = answer.usage.prompt_tokens // PAGE
    assert await _told(server, before + pages) == before + pages


async def _told(server: Server, least: int) -> int:
    """Pages on the device, as the stream of events has them: ``least`` or more."""
    mirror = Mirror()
    with Subscriber(f"ipc://{server.place}/events", f"ipc://{server.place}/again", topic="kv") as subscriber:
        async with asyncio.timeout(SOON):
            while True:
                for _, batch in await asyncio.to_thread(lambda: list(subscriber.catch_up())):
                    mirror.apply(batch)
                if len(mirror.blocks["GPU"]) >= least:
                    return len(mirror.blocks["GPU"])


# from its start to its end


@pytest.mark.parametrize("path", list(PATHS))
async def test_ctrl_c_saves_and_a_restart_finds_it(path: str, folder: Path, tmp_path: Path) -> None:
    options = ("--model", str(folder), "--path", path, "--device-tokens", "1024", "--host-tokens", "1024",
               "--storage", f"file:{tmp_path / 'kv'}?capacity=64MiB&segment=8MiB")  # fmt: skip
    whole = (len(prompt_tokens(folder, STORY)) - 1) // PAGE * PAGE
    asked: dict[str, Any] = {"model": str(folder), "temperature": 0, "prompt": STORY, "max_tokens": 4}
    for found in (0, whole):
        with running(*options) as server:
            async with server.client() as client:
                answer = await client.completions.create(**asked)
                usage: Any = answer.usage
                assert usage.prompt_tokens_details.cached_tokens_by_tier == {"device": 0, "host": 0, "storage": found}
                assert answer.choices[0].text == said(folder, STORY, 4)
            server.stop(signal.SIGINT)


def test_a_model_that_is_none_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    for place, more in ((str(tmp_path), ()), (str(tmp_path / "nowhere"), ("--path", "prefix"))):
        assert openai_server.main(["--model", place, *more]) == 2
        out, told = capsys.readouterr()
        assert out == ""
        assert told.startswith(f"openai_server: --model={place}: ")
        assert told.count("\n") == 1


BLOCKED = "import sys, runpy; sys.modules[{name!r}] = None; runpy.run_path({path!r}, run_name='__main__')"


@pytest.mark.parametrize("name", ["uvicorn", "jinja2", "torch", "asynccache"])
def test_a_missing_extra_is_a_sentence_with_a_command(name: str) -> None:
    """That installs what is missing, into a clone or beside an installed package."""
    done = run("-c", BLOCKED.format(name=name, path=str(ROOT / "examples" / "openai_server.py")))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"openai_server: {name} is not installed: pip install -e '{ROOT}[server]'\n"


def test_all_that_it_imports_is_in_its_extra() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {re.split(r"[^\w-]", each)[0].replace("-", "_") for extra in ("server", "hf", "metrics")
             for each in [*wanted["optional-dependencies"][extra], *wanted["dependencies"]]}  # fmt: skip
    assert set(openai_server.NEEDS) <= known | {"asynccache"}


def test_the_reference_is_not_all_noise(folder: Path) -> None:
    """So that the comparisons above say something: answers differ, and have characters of several bytes' making."""
    answers = {said(folder, f"{STORY[:60]} {5 * i}", 4) for i in range(4)}
    assert len(answers) == 4
    assert loaded(folder)[0].generation_config.repetition_penalty == 1.5
