"""A command answers with a sentence and never with a traceback, whatever it is given: words, files, addresses, numbers,
disks and pipes that cannot be used. The effects of a closed pipe or a full disk on a process are tried with processes.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from asynccache.cli.main import main
from tests.cli.trace_kit import made_trace, write_trace
from tests.processes import program

FILES = ("junk", "folder", "nowhere", "zeros", "brackets")
URLS = ("http://[::1", "http://exa mple", "http://127.0.0.1:99999", "ftp://x", ":::", "", "http://127.0.0.1:1",
        "http://\x07")
STORES = ("nope:", ":::", "file:", "file:junk", "file:/proc/x", "memory:?capacity=-3", "memory:?nope=1",
          "file:x?capacity=1")
CASES = [
    *(["replay", file] for file in FILES),
    *(["plan", file] for file in FILES),
    *(["stress", "--requests", "1", "--config", file] for file in FILES),
    *(["config", action, file] for action in ("check", "show") for file in FILES),
    *(["explain", url, "--tokens", "1"] for url in URLS),
    *(["explain", "http://127.0.0.1:1", "--tokens", text] for text in ("", "x", "1.5", "@folder", "@junk", "@")),
    *(["store", action, url] for action in ("stat", "verify") for url in STORES),
    *(["stress", "--requests", "1", option, "folder"] for option in ("--json", "--report")),
    ["stress", "--requests", "0"], ["stress", "--seed", "x"], ["store", "stat", "file:/no/such/folder/at/all"],
    ["bench", "store", "--bytes", "x"], ["bench", "ttft", "--prefix", "7"], ["plan", "junk", "--host-gib", "x"],
    ["stress", ""], ["replay", ""], ["stress", "--config", ""], ["store", "stat", ""], ["plan", "", "--json", ""],
]  # fmt: skip
VLLM = "config vllm --storage 'file:/var/kv?capacity=500GiB'"
SERVE = "serve --listen unix:/tmp/s --memory"
REFUSED = [
    # runs
    ("stress --window 0", "--window=0 must be at least 1; see asynccache stress --help"),
    ("stress --concurrency 99999999999999999999", "--concurrency=99999999999999999999 must lie between 1 and 65536"),
    ("stress --page-size x", "--page-size='x' must be an integer"),
    ("stress --cancel-rate 1.5", "--cancel-rate=1.5 must lie between 0 and 1"),
    ("stress --faults nan", "--faults=nan must be a finite number"),
    ("stress --duration 0", "--duration=0.0 must be above 0"),
    ("stress --duration 1e300", "--duration=1e+300 must be at most 1000000000000000.0"),
    ("stress --serve 65536", "--serve=65536 must lie between 0 and 65535"),
    ("stress --workload chatt", "--workload='chatt' must be one of agent, chat, mixed, random, shared; did you mean"),
    ("stress --components full,sva", "'sva' must be one of full, swa, mamba; did you mean 'swa'"),
    ("stress --components swa", "--components=swa must begin with full; swa and mamba may follow, each once"),
    ("stress --components full,full", "each once"),
    ("stress --write-policy write_trough", "did you mean 'write_through'"),
    ("stress --prefetch-policy never", "--prefetch-policy='never' must be one of best_effort, "),
    ("stress --eviction fifo", "--eviction='fifo' must be one of lru, p2c"),
    ("stress --storage disk", "--storage='disk' must be 'none' or a URL"),
    ("stress --storage memory: --storage /var/kv", "must be 'none' or a URL"),
    ("stress --host-tokens none --storage redis://u:hunter2@h:1", "--storage=redis://***@h:1 needs a host tier"),
    ("stress --storage mongo:x", "unknown backend 'mongo'; installed: az, file, gs, host, memory, "),
    ("stress --storage file:/proc/nope", "/proc/nope"),
    ("stress --storage 'memory:?capasity=1GiB'", "unknown option 'capasity'"),
    ("stress --device-tokens all", "--device-tokens=all works with replay only"),
    ("stress --device-tokens none", "--device-tokens=none must be a number of tokens, at least 1, or 'all'"),
    ("stress --device-tokens 12289", "device_tokens=12289 is not a multiple of page_size=16"),
    ("stress --host-tokens 24577", "host_tokens=24577 is not a multiple of page_size=16"),
    ("stress --bytes-per-token 3 --layers 5", "not a multiple of layers=5"),
    (f"stress --device-tokens {1 << 44}", f"pool 'full' on the device: device_pages={1 << 40}: "),
    (f"stress --host-tokens {1 << 44}", f"pool 'full' on the host: host_pages={1 << 40}: "),
    ("stress --loop trio", "--loop='trio' must be one of asyncio, uvloop"),
    ("stress --device tpu", "--device=tpu: unknown device 'tpu'"),
    ("stress --config /no/such.toml", "/no/such.toml: cannot be read: No such file"),
    ("stress --json no/such.json", "no/such.json: cannot be written"),
    ("stress --report no/such.html", "--report=no/such.html: cannot be written"),
    ("stress --report -", "--report=-: the page goes to a file only"),
    ("stress --pp 8", "--pp=8: a stage would have no layer, there are --layers=4"),
    ("stress --tp 3", "--bytes-per-token=512 must be a multiple of 12: 4 layers over tp 3 and cp 1"),
    ("stress --tp 16 --pp 8", "there are 128 ranks, --tp 16 --cp 1 --pp 8: this command runs 64 at most"),
    ("stress --tp 2 --replicated ful", "--replicated=ful: no pool 'ful'; there are full"),
    ("stress --tp 2 --replicated full:dp", "'full:dp' must be NAME, NAME:tp, NAME:cp or NA"),
    ("stress --sidecars idx:full", "--sidecars=idx:full: 'idx:full' must be NAME:FROM:BYTES_PER_TOKEN or deepseek-v4"),
    ("stress --sidecars a:full:1,b", "'b' must be NAME:FROM:BYTES_PER_TOKEN"),
    ("replay trace.jsonl --sidecars x", "--sidecars=x: 'x' must be NAME:FROM:BYTES_PER_TOKEN"),
    ("stress --sidecars a:full:many", "'a:full:many' must be"),
    ("stress --sidecars a:full:0", "or deepseek-v4, of at least 1 byte per token"),
    ("stress --sidecars a:b:4", "sidecar 'a': indices_from='b' is no pool"),
    ("stress --components full,swa --sidecars a:mamba:4", "sidecar 'a': indices_from='mamba' is no pool"),
    ("stress --sidecars a:b:4,b:a:4", "closes a cycle"),
    ("stress --sidecars full:full:4", "names must be unique"),
    ("stress --sidecars 'a b:full:4'", "Expected `str` matching regex"),
    ("replay trace.jsonl --device-tokens 2048", "--device-tokens=2048: request"),
    ("replay absurd.jsonl", "absurd.jsonl:2: output_length=1000000000000 must lie between"),
    ("plan absurd.jsonl", "absurd.jsonl:2: output_length=1000000000000 must lie between"),
    # plan, explain, doctor
    ("plan trace.jsonl --host-gib 1_0", "--host-gib=1_0 must be sizes"),
    ("plan trace.jsonl --host-gib x", "--host-gib=x must be sizes in GiB above 0, with commas"),
    ("plan trace.jsonl --host-gib=-1", "--host-gib=(-1.0,): Expected `float` > 0.0"),
    ("plan trace.jsonl --host-gib ''", "needs a host tier"),
    ("plan trace.jsonl --prefill-tokens-per-s 0", "--prefill-tokens-per-s=0.0 must be above 0"),
    ("plan trace.jsonl --limit 0", "--limit=0 must be at least 1"),
    ("plan trace.jsonl --conversations 3", "--conversations=3"),
    ("explain http://127.0.0.1:1 --tokens 1", "does not answer"),
    ("explain nonsense://x --tokens 1", "no address"),
    ("explain http://127.0.0.1:1 --tokens 1,b", "'b' is no token id"),
    ("explain http://127.0.0.1:1 --tokens 1,--5", "'--5' is no token id"),
    ("explain http://127.0.0.1:1 --tokens 1.5", "'1.5' is no token id"),
    (f"explain http://127.0.0.1:1 --tokens {'9' * 5000}", "is no token id"),
    ("explain http://127.0.0.1:1 --tokens @/nowhere", "cannot be read"),
    ("doctor --storage memory:", "--storage needs --engine"),
    ("doctor --host 1GiB", "--host needs --engine"),
    ("doctor --engine triton", "--engine"),
    # config
    ("config check", "needs a FILE"),
    ("config vllm", "config vllm needs --storage URL"),
    ("config sglang", "config sglang needs --storage URL"),
    ("config vllm --storage kv", "expected scheme:path"),
    ("config vllm --storage none", "is no store"),
    ("config vllm --storage tape:x", "tape"),
    ("config vllm --storage 'file:/x?capcity=1GiB'", "capcity"),
    ("config vllm --storage file:/x/{tp_rank}", "{tp_rank} means nothing under vllm, which knows {dp_rank}"),
    ("config vllm --storage redis://:hunter2@kv/{tp_rank}", "{tp_rank} means nothing"),
    ("config sglang --storage file:/x/{rank}", "{rank} means nothing under sglang"),
    (f"{VLLM} --host lots", "--host="),
    (f"{VLLM} --host 12", "--host=12"),
    (f"{VLLM} --block-size 24", "--block-size=24: vLLM stores whole multiples"),
    (f"{VLLM} --block-size 0", "--block-size=0"),
    (f"{VLLM} --namespace ''", "--namespace"),
    (f"{VLLM} --compatible-with ''", "--compatible-with='' must be a version"),
    ("config sglang --storage memory: --compatible-with 'the last'", "'the last' must be a version"),
    ("config check kv.toml --compatible-with 0.32.0", "--compatible-with is for config vllm"),
    (f"{VLLM} kv.toml", "config vllm takes no FILE"),
    (f"{VLLM} --json", "config vllm takes no --json"),
    ("config show --host 1GiB", "--host is for config vllm and config sglang"),
    ("config check kv.toml --storage memory:", "--storage is for config vllm"),
    # serve
    ("serve --memory 1GiB", "--listen=(missing) must be unix:/PATH"),
    ("serve --listen 127.0.0.1:1 --memory 1GiB", "must be unix:/PATH"),
    ("serve --listen unix:/tmp/s", "--memory is missing"),
    (f"{SERVE} lots", "--memory='lots' is no size"),
    ("serve --listen unix:/nowhere/s --memory 4KiB", "a host process needs 1048576 bytes at least"),
    ("serve --listen unix:/nowhere/s --memory 2MiB", "listen=unix:/nowhere/s: No such file or directory"),
    (f"{SERVE} 1GiB --limit 16GiB", "--limit=16GiB must be LABEL=SIZE"),
    (f"{SERVE} 1GiB --metrics here", "--metrics=here must be HOST:PORT"),
    (f"{SERVE} 2MiB --storage teapot:x", "unknown backend 'teapot'"),
    (f"{SERVE} 2MiB --storage none", "there is nothing to attach"),
    (f"{SERVE} 2MiB --storage memory: --storage memory:", "is attached"),
    (f"{SERVE} 2MiB --group no-such-group", "there is no such group"),
    ("serve --config /nowhere.toml", "--config=/nowhere.toml:"),
    ("serve --config serve.toml", "unknown option 'memmory'; one of events, events_replay"),
    # verify-engine
    ("verify-engine nonsense://x", "is no address of a server"),
    ("verify-engine http://x:99999", "is no address"),
    ("verify-engine http://", "is no address"),
    ("verify-engine http://127.0.0.1:1", "does not answer"),
    ("verify-engine http://x --length 99999999", "--length=99999999"),
    ("verify-engine http://x --length 1", "--length=1"),
    ("verify-engine http://x --prompts 0", "--prompts=0"),
    ("verify-engine http://x --timeout 0", "--timeout=0"),
    ("verify-engine http://x --tolerance -1", "--tolerance=-1"),
    (f"verify-engine http://x --flush-host {'9' * 40}", "give a command, or an address or a number"),
    ("verify-engine http://x --restart ' '", "give a command, or an address or a number"),
]  # fmt: skip
MISUSED = [
    ("frob", ""), ("replay", ""), ("bench stor", ""), ("bench nothing", ""), ("stress trace.jsonl", ""),
    ("config nothing", ""), ("stress --nothing", ""), ("stress --page-sise=3", "did you mean '--page-size'?"),
    ("plan t --lmit 3", "did you mean '--limit'?"), ("stress --conkurrency 3", "did you mean '--concurrency'?"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files that are not what they should be, and a trace."""
    made = tmp_path_factory.mktemp("files")
    (made / "junk").write_bytes(bytes(range(256)))
    (made / "zeros").write_bytes(bytes(10_000))
    (made / "brackets").write_text("[" * 100_000)
    (made / "folder").mkdir()
    (made / "serve.toml").write_text("memmory = 1\n")
    good = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}
    write_trace(made / "absurd.jsonl", (good | {"output_length": length} for length in (7, 10**12)))
    made_trace(made / "trace.jsonl")
    return made


def said(everything: str) -> str:
    for word in ("Traceback", "bug in asynccache", "Exception ignored", "Error:", "hunter2"):
        assert word not in everything, everything[-2000:]
    return everything


def ended(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as end:                          # of the parser
        return end.code


@pytest.mark.parametrize("arguments", CASES, ids=lambda arguments: " ".join(arguments)[:60])
def test_a_sentence_is_the_answer(
    arguments: list[str], folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    status = ended(arguments)
    out, err = capfd.readouterr()
    words = said(err + out)
    assert status in (1, 2), words
    assert words.startswith("asynccache"), words
    assert max(map(len, words.splitlines())) < 1000


@pytest.mark.parametrize(("line", "sentence"), REFUSED, ids=[line[:60] for line, _ in REFUSED])
def test_what_cannot_be_used_is_named_in_one_sentence_before_anything_starts(
    line: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before, words = sorted(folder.rglob("*")), shlex.split(line)
    if words[0] in ("stress", "replay"):
        words += ["--quiet"] if "--storage" in words else ["--quiet", "--storage", "file:kv?capacity=1GiB"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (sentence in said(err), err.startswith("asynccache: "), err.count("\n"), out) == (True, True, 1, ""), err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("line", "hint"), MISUSED)
def test_misuse_is_a_sentence_and_2(line: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(line.split()) == 2
    error = said(capsys.readouterr().err)
    assert hint in error
    assert "--help shows what can be given" in error


RUN = ["stress", "--requests", "3"]
HEAD = '"$@" | head -c 5; exit ${PIPESTATUS[0]}'


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "shell", "statuses"), [
    (["replay", "junk"], '"$@"', {2}), (["explain", "http://127.0.0.1:1", "--tokens", "1"], '"$@"', {2}),
    (["config", "schema"], HEAD, {0, 1}), ([*RUN, "--json", "-"], HEAD, {0, 1}),
    (RUN, '"$@" >&-', {0}), (RUN, '"$@" 2>&-', {0}), (["config", "schema"], '"$@" >&-', {0}),
    (["config", "schema"], '"$@" > /dev/full', {2}), ([*RUN, "--quiet", "--json", "-"], '"$@" > /dev/full', {2}),
    ([*RUN, "--quiet", "--json", "/dev/full"], '"$@"', {2}), ([*RUN, "--quiet", "--report", "/dev/full"], '"$@"', {2}),
])  # fmt: skip
def test_nobody_listens_or_the_disk_is_full(
    arguments: list[str], shell: str, statuses: set[int], folder: Path
) -> None:
    command = (sys.executable, "-m", "asynccache", *arguments)
    done = program("bash", "-c", shell, "bash", *command, cwd=folder, env={"PYTHONUNBUFFERED": ""})  # as users have it
    words = said(done.stderr + done.stdout)
    assert done.returncode in statuses, done.stderr
    assert statuses != {2} or words.startswith("asynccache: ")
