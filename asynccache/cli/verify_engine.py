"""``asynccache verify-engine URL``: whether a server answers from its KV cache as it answers without it.

A checksum sees what a store did to a page. It does not see a layer that was copied to the wrong place, a page that was
shifted, or a state of another prompt: such a server goes on, and says something else. So prompts are sent cold, and
then so that their KV comes from each tier, and the answers are compared: greedy tokens and log-probabilities. They may
differ by ``FACTOR`` times what two cold runs of the same server differ by.

Cold means another ``cache_salt`` for each request; of a server that knows no salts, the first run of a prompt is cold.
How prompts leave a tier is up to the user: a command, an address to POST to, or a number of tokens of other prompts.
Nothing of asynccache needs to be in the server. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import gcd, inf
from random import Random
from textwrap import wrap
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from asynccache.cli.openai_client import Client, Completion, EngineError, apart
from asynccache.cli.options import MOST, CommandOptions, Concurrency, Json, NotNegative, Rate, option
from asynccache.cli.output import Tell, answer, number, progress
from asynccache.errors import ConfigError
from asynccache.settings import Amount, Count
from asynccache.settle import each

T = TypeVar("T")

FACTOR = 3.0
"""How many times the difference of two cold runs is allowed: a hit is computed in other pieces than a cold prompt."""
UNSTEADY = 1.0
"""In nats. A prompt whose cold runs are further apart proves nothing, and is left out. If most are, the server cannot
be verified."""
LONGEST = 1 << 22
LEARNING = 8
TURNS, TALKS = 3, 2
ENDS = ("before", "on", "after")
PLAIN_TOKENS = range(10, 91)
"""Tokens that every vocabulary has: characters or bytes. They are used if the server has no ``/tokenize``."""
WORDS = (
    "river stone window paper yellow quickly under seven garden market letter because winter light machine song road "
    "never people water small under table story green number after circle house morning friend color answer copper "
    "island history open silver wheel bread forest gentle anchor basket candle doctor engine flower guitar hammer"
)


class Options(CommandOptions, frozen=True, kw_only=True):
    """The options of ``verify-engine``."""

    url: Annotated[str, option("URL", "the server, such as http://127.0.0.1:8000; if OPENAI_API_KEY is set, it is sent",
                               argument=True)]  # fmt: skip
    flush_device: Annotated[str | None, option(
        "HOW", "how prompts leave the device tier, so that they come from the next one: a command, a path or URL to "
        "POST to, or a number: so many tokens of other prompts")] = None
    flush_host: Annotated[str | None, option(
        "HOW", "the same for host memory and the device, so that prompts come from storage")] = None
    restart: Annotated[str | None, option("COMMAND", "a command that restarts the server; what comes then is from "
                                                     "storage, or from another process")] = None
    model: Annotated[tuple[str, ...], option(
        "NAME", "what requests call the model; may be given several times, for adapters: each gets the same prompts "
        "(default: the first that the server lists)", several=True)] = ()
    prompts: Annotated[Concurrency, option(
        "N", "prompts for each model; half of them are sent one by one, half together")] = 12
    length: Annotated[int, Meta(ge=2, le=LONGEST), option("TOKENS", "length of the longest prompt")] = 512
    new_tokens: Annotated[Count, option("N", "tokens of an answer")] = 16
    at_once: Annotated[Concurrency, option("N", "requests at a time, where prompts are sent together")] = 8
    page_size: Annotated[Count | None, option(
        "TOKENS", "tokens in a page (default: what the hits' lengths say)")] = None
    tolerance: Annotated[NotNegative, option(
        "NATS", "the difference of log-probabilities that is allowed even where two cold runs agree better")] = 0.01
    pause: Annotated[NotNegative, option(
        "SECONDS", "waited before a flush or a restart, in which pages are copied")] = 2.0
    wait: Annotated[Rate, option("SECONDS", "how long a command, and a restarted server, may take")] = 600.0
    timeout: Annotated[Rate, option("SECONDS", "how long an answer may take")] = 120.0
    seed: Annotated[Amount | None, option("N", "the prompts' seed (default: another one each time)")] = None
    json: Json = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("flush_device", "flush_host", "restart"):
            how = getattr(self, name)
            if how is not None and (not how.strip() or (how.isdecimal() and float(how) > MOST)):
                raise ConfigError(f"--{name.replace('_', '-')}={how}: give a command, or an address or a number of "
                                  f"tokens")  # fmt: skip


@dataclass
class Probe:
    """A prompt for a model, and what the cold server made of it."""

    model: str
    prompt: str | list[int]
    ends: str
    """Where the prompt ends."""
    together: bool
    """Whether the prompt is sent with others."""
    cold: Completion | None = None
    steady: bool = True
    """Whether two cold runs agreed."""


@dataclass
class Tier:
    """The prompts whose KV should come from one tier, and how their answers compare."""

    tier: str
    how: str
    """What was done so that the KV comes from this tier."""
    wants_hits: bool = True
    prompts: int = 0
    prompts_hit: int = 0
    tokens: int = 0
    tokens_hit: int = 0
    hits_by_tier: dict[str, int] = field(default_factory=dict)
    differences: int = 0
    first: dict[str, Any] | None = None
    """The first difference."""

    @property
    def verdict(self) -> str:
        if self.differences:
            return "wrong"
        return "right" if self.prompts_hit or not self.wants_hits else "not hit"


def execute(options: Options) -> int:
    """Verify the server and print what was found. Returns the exit status: 0, every tier that was asked for was hit and
    answers as the cold server does; 1 otherwise.

    Raises:
        ConfigError: an option cannot be used, or a command failed.
        EngineError: the server cannot be verified.
    """
    with progress() as tell:
        report = asyncio.run(Verification(options, tell).report())
    answer(report, "\n".join(told(report)), options.json)
    return 0 if report["right"] else 1


class Verification:
    """One run of the command."""

    def __init__(self, options: Options, tell: Tell) -> None:
        self.options = options
        self._key = os.environ.get("OPENAI_API_KEY")
        self.client = Client(options.url, options.timeout, self._key)
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self._random = Random(self.seed)
        self._words = WORDS.split()
        self._tell = tell
        self.models: tuple[str, ...] = options.model
        self.page = options.page_size or 0
        self.salts = True
        self.probes: list[Probe] = []
        self.tiers: list[Tier] = []
        self.notes: list[str] = []
        self.noise, self.allowed = 0.0, options.tolerance
        self._head, self._pool = list[int](), list(PLAIN_TOKENS)
        self._context = inf
        self._hit = 0  # tokens from which on it is a hit, and not just the token for the beginning of a text

    async def report(self) -> dict[str, Any]:
        """Send everything, and return what was found.

        Raises:
            ConfigError: an option cannot be used, or a command failed.
            EngineError: the server cannot be verified.
        """
        await self._look()
        await self._learn()
        self._plan()
        await self._cold()
        new = Tier("new", "prompts that it has not seen", wants_hits=False)
        if self.salts:
            await self._compare(new, self.probes)
        await self._compare(Tier("device", "the same prompts again"), self.probes)
        await self._talk()
        for name, how in (("host", self.options.flush_device), ("storage", self.options.flush_host)):
            if how is not None:
                await self._flush(name, how)
                await self._compare(Tier(name, f"after {how}"), self.probes)
        if self.options.restart is not None:
            await self._flush("restart", self.options.restart)
            await self._compare(Tier("restart", f"after {self.options.restart}"), self.probes)
        self._note()
        return {
            "command": "verify-engine", "url": self.client.url, "models": self.models, "page_size": self.page,
            "seed": self.seed, "cache_salt": self.salts, "prompts": len(self.probes),
            "new_tokens": self.options.new_tokens, "cold_runs_differ_by": self.noise, "allowed": self.allowed,
            "unsteady": sum(not probe.steady for probe in self.probes),
            "tiers": [asdict(tier) | {"verdict": tier.verdict} for tier in self.tiers], "notes": self.notes,
            "right": all(tier.verdict == "right" for tier in self.tiers),
        }  # fmt: skip

    # what the server is like

    async def _look(self) -> None:
        """Find the models, their context, and tokens that make words."""
        found = await self.client.ask("/v1/models")
        try:
            cards = {str(card["id"]): card for card in found["data"]}
            self.models = self.models or (next(iter(cards)),)
            limits = [cards.get(model, {}).get("max_model_len") for model in self.models]
        except (KeyError, TypeError, AttributeError, StopIteration):
            raise EngineError(f"{self.client.url}/v1/models names no model") from None
        self._context = min((n for n in limits if isinstance(n, int)), default=inf)
        if self.options.length + self.options.new_tokens > self._context:
            raise ConfigError(f"--length={self.options.length} and --new-tokens={self.options.new_tokens} are more "
                              f"than the server's context of {self._context} tokens")  # fmt: skip
        try:
            texts = [" ".join(self._words), " ".join(reversed(self._words))]
            one, other = [(await self.client.ask("/tokenize", {"model": self.models[0], "prompt": text}))["tokens"]
                          for text in texts]  # fmt: skip
            self._head = one[:1] if one[0] == other[0] else []  # such as a token for the beginning of a text
            self._pool = sorted({int(token) for token in one} - set(self._head))
        except (EngineError, KeyError, TypeError, ValueError, IndexError):
            self.notes.append(f"the server has no /tokenize: prompts are of the tokens {PLAIN_TOKENS[0]} to "
                              f"{PLAIN_TOKENS[-1]}")  # fmt: skip

    async def _learn(self) -> None:
        """Find out whether hits are told, how long a page is, and whether salts keep prompts apart."""
        length, hits = self.options.length, list[int]()
        for i in range(LEARNING):
            self._tell(f"what the server is like: {i} of {LEARNING} prompts")
            prompt = self._tokens(self._random.randint(length // 2 + 1, length))
            salt: str | None = secrets.token_hex(8)
            try:
                await self.client.complete(self.models[0], prompt, 1, salt if self.salts else None)
            except EngineError as error:
                if not self.salts or i or not 400 <= error.status < 500 or error.status == 404:
                    raise
                self.salts = False
                await self.client.complete(self.models[0], prompt, 1, None)
            again = await self.client.complete(self.models[0], prompt, 1, salt if self.salts else None)
            hits.append(again.cached)
            if self.salts and i == 0:
                other = await self.client.complete(self.models[0], prompt, 1, secrets.token_hex(8))
                self.salts = other.cached <= again.cached // 2
        if not any(hits):
            raise EngineError(f"{self.client.url}: a prompt that was sent twice had no cached tokens by "
                              f"usage.prompt_tokens_details.cached_tokens. Is the cache of prefixes on? Are its pages "
                              f"longer than the prompts (--length)? vLLM tells hits with "
                              f"--enable-prompt-tokens-details, SGLang with --enable-cache-report")  # fmt: skip
        self.page = self.page or gcd(*hits)
        self._hit = max(self.page, 8)
        if not self.salts:
            self.notes.append("the server does not keep prompts apart by cache_salt: each prompt was cold once, two "
                              "cold runs were not compared, and conversations were left out")  # fmt: skip

    def _tokens(self, count: int) -> list[int]:
        return (self._head + self._random.choices(self._pool, k=count))[:count]

    def _text(self, count: int) -> str:
        return " ".join(self._random.choices(self._words, k=count)) + "."

    def _plan(self) -> None:
        """Make the prompts: of two pages to as many as fit, ending before, on and after a page's end."""
        most = max(2, (self.options.length - 1) // self.page)
        for i in range(self.options.prompts):
            pages = 2 + (most - 2) * (i + 1) // self.options.prompts
            longest = int(min(self._context - self.options.new_tokens, LONGEST))
            prompt = self._tokens(min(max(2, pages * self.page + i % 3 - 1), longest))
            for model in self.models:
                self.probes.append(Probe(model, prompt, ENDS[i % 3], together=i // 3 % 2 == 1))

    # answers

    async def _ask(self, probe: Probe, *, cold: bool = False) -> Completion:
        salt = secrets.token_hex(8) if cold and self.salts else None
        return await self.client.complete(probe.model, probe.prompt, self.options.new_tokens, salt)

    async def _cold(self) -> None:
        """Answer every prompt without a hit: alone, and then all of them together."""

        async def first(probe: Probe) -> None:
            probe.cold = await self._ask(probe, cold=True)
            if probe.cold.cached >= self._hit:
                raise EngineError(f"{self.client.url}: a prompt that it has not seen has {probe.cold.cached} cached "
                                  f"tokens; give another --seed, or empty its cache")  # fmt: skip

        async def second(probe: Probe) -> None:
            assert probe.cold is not None
            found = apart(probe.cold, await self._ask(probe, cold=True)).nats
            probe.steady = found <= UNSTEADY
            self.noise = max(self.noise, found if probe.steady else 0.0)

        await self._each("cold", self.probes, first, 1)
        if self.salts:
            await self._each("cold, together", self.probes, second, self.options.at_once)
        unsteady = sum(not probe.steady for probe in self.probes)
        if 2 * unsteady > len(self.probes):
            raise EngineError(f"{self.client.url}: two cold runs of {unsteady} of {len(self.probes)} prompts were more "
                              f"than {UNSTEADY:g} nats apart, so its answers say nothing about its cache")  # fmt: skip
        self.allowed = max(self.options.tolerance, FACTOR * self.noise)

    async def _compare(self, tier: Tier, probes: Sequence[Probe]) -> None:
        self.tiers.append(tier)

        async def one(probe: Probe) -> None:
            await self._check(tier, probe, await self._ask(probe))

        steady = [probe for probe in probes if probe.steady]
        await self._each(tier.tier, [probe for probe in steady if not probe.together], one, 1)
        await self._each(f"{tier.tier}, together", [probe for probe in steady if probe.together], one,
                         self.options.at_once)  # fmt: skip

    async def _check(self, tier: Tier, probe: Probe, said: Completion) -> None:
        assert probe.cold is not None
        tier.prompts += 1
        tier.prompts_hit += said.cached >= self._hit
        tier.tokens += said.prompt
        tier.tokens_hit += said.cached
        for name, hits in said.tiers.items():
            tier.hits_by_tier[name] = tier.hits_by_tier.get(name, 0) + hits
        found = apart(probe.cold, said, self.allowed)
        if found.token is None:
            return
        tier.differences += 1
        if tier.first is None:
            at = said.prompt + found.token
            tier.first = first = {
                "model": probe.model, "ends": probe.ends, "together": probe.together, "prompt_tokens": said.prompt,
                "cached_tokens": said.cached, "position": at, "page": at // self.page,
                "nats": found.nats if found.nats < inf else None, "kv_page": None,
                "says": _at(said, found.token), "cold_says": _at(probe.cold, found.token),
                "logprob": _furthest(probe.cold, said, found.token),
            }  # fmt: skip
            first["kv_page"] = await self._wrong_page(probe, said.cached)

    async def _wrong_page(self, probe: Probe, cached: int) -> int | None:
        """The first page of KV with which answers differ, by bisection: prompts that end a token behind a page, cold
        and with the pages that the cache has. None: shorter prompts are all right, or it cannot be known."""
        if not self.salts or isinstance(probe.prompt, str):
            return None
        right, wrong, found = 0, cached // self.page + 1, False
        while wrong - right > 1:
            middle = (right + wrong) // 2
            part = Probe(probe.model, probe.prompt[: middle * self.page + 1], "", together=False)
            bad = apart(await self._ask(part, cold=True), await self._ask(part), self.allowed).token is not None
            right, wrong, found = (right, middle, True) if bad else (middle, wrong, found)
        return wrong - 1 if found else None

    async def _talk(self) -> None:
        """Conversations that go on from the server's own words. Their last turns are prompts for later tiers."""
        if not self.salts:
            return
        tier = Tier("turns", "conversations that go on from its own answers")
        self.tiers.append(tier)
        for i in range(TALKS):
            text, last = self._text(max(8, self.options.length // 16)), None
            for turn in range(TURNS):
                self._tell(f"turns: {i * TURNS + turn} of {TALKS * TURNS}")
                probe = Probe(self.models[0], text, f"turn {turn + 1}", together=i % 2 == 1)
                try:
                    said = await self._ask(probe)
                except EngineError as error:
                    if last is None or not 400 <= error.status < 500:
                        raise
                    break  # the context does not hold this turn
                if said.prompt + self.options.new_tokens > self._context:
                    break
                probe.cold = await self._ask(probe, cold=True)
                await self._check(tier, probe, said)
                text, last = f"{text}{said.text} {self._text(8)}", probe
            self.probes += [last] if last else []

    async def _each(self, what: str, items: Sequence[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
        """Do ``work`` for each of ``items``, one for each prompt, ``at_once`` at a time. The first error ends the
        others."""
        done = 0

        async def one(item: T) -> None:
            nonlocal done
            self._tell(f"{what}: {number(done)} of {number(len(items))} prompts")
            await work(item)
            done += 1

        await each(items, one, at_once)

    # tiers

    async def _flush(self, name: str, how: str) -> None:
        """Do what the user says, after which prompts come from the tier called ``name``."""
        self._tell(f"{name}: {self.options.pause:g} s for pages that are being copied")
        await asyncio.sleep(self.options.pause)
        if name != "restart" and how.isascii() and how.isdigit():
            await self._flood(name, int(how))
        elif name != "restart" and how.startswith(("/", "http://", "https://")) and " " not in how:
            self._tell(f"{name}: POST {how}")
            own = how.startswith("/")
            at = Client(f"{self.client.url}{how}" if own else how, self.options.wait, self._key if own else None)
            status, said = await _within(self.options.wait, at.send("", {}), f"POST {how}")
            if not 200 <= status < 300:
                raise EngineError(f"POST {how} answers {status}: {said[:200].decode(errors='replace')}", status)
        else:
            self._tell(f"{name}: {how}")
            await _run(how, self.options.wait)
        await _within(self.options.wait, self._serving(name), f"after {how} the server")

    async def _flood(self, name: str, count: int) -> None:
        """Send other prompts, of ``count`` tokens together."""
        length = int(min(self._context - 1, max(4 * self.options.length, 2048)))

        async def one(_: int) -> None:
            await self.client.complete(self.models[0], self._tokens(length), 1, None)

        await self._each(f"{name}: other prompts", range(-(-count // length)), one, self.options.at_once)

    async def _serving(self, name: str) -> None:
        while True:
            self._tell(f"{name}: waiting for the server")
            try:
                await self.client.complete(self.models[0], self._tokens(2), 1, None)
                return
            except EngineError as error:
                if 400 <= error.status < 500:
                    raise
            await asyncio.sleep(0.2)

    def _note(self) -> None:
        if unsteady := sum(not probe.steady for probe in self.probes):
            self.notes.append(f"{unsteady} prompts were left out: two cold runs were more than {UNSTEADY:g} nats apart")
        for found in self.tiers:
            for other, hits in found.hits_by_tier.items():
                if found.tier in ("device", "host", "storage") and other != found.tier and hits:
                    self.notes.append(f"{found.tier}: {number(hits)} of its {number(found.tokens_hit)} tokens came "
                                      f"from the {other} tier, by the server's own count")  # fmt: skip
            if found.tier == "new" and found.prompts_hit:
                self.notes.append(f"new: {number(found.tokens_hit)} tokens were hit by prompts that it had not seen: "
                                  f"is that the KV of another model or adapter (or an old --seed)?")  # fmt: skip


def _at(said: Completion, token: int) -> str | None:
    return said.tokens[token] if token < len(said.tokens) else None


def _furthest(cold: Completion, said: Completion, token: int) -> dict[str, Any] | None:
    """The likely token whose log-probability differs most at a place of two answers; None: there is none in both."""
    if token >= min(len(cold.top), len(said.top)):
        return None
    own, its = cold.top[token], said.top[token]
    shared = sorted(own.keys() & its.keys())
    most = max(shared, key=lambda text: abs(own[text] - its[text]), default=None)
    return None if most is None else {"of": most, "cold": own[most], "hit": its[most]}


async def _within(seconds: float, work: Awaitable[Any], what: str) -> Any:
    """Return what ``work`` returns.

    Raises:
        EngineError: it takes longer than ``seconds``, or the server cannot be reached.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise EngineError(f"{what} did not answer within {seconds:g} s (--wait)") from None
    except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise EngineError(f"{what}: {error}") from None


async def _run(command: str, seconds: float) -> None:
    """Run a command in a shell, in a process group of its own, which ends with it if this is cancelled. What it leaves
    running in the background may keep its output open, so that goes to a file.

    Raises:
        ConfigError: it fails, or takes longer than ``seconds``.
    """
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            async with asyncio.timeout(seconds):
                status = await process.wait()
        except TimeoutError:
            raise ConfigError(f"{command!r} took longer than {seconds:g} s (--wait)") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):  # it has ended, and nobody has heard of that yet
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        said.seek(0)
        if status:
            lines = said.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it says nothing")
            raise ConfigError(f"{command!r} failed with status {status}: {last[:200]}")


# the report as text


def told(report: dict[str, Any]) -> list[str]:
    """The report as lines of at most 80 columns."""
    lines = [f"{report['url']}: {', '.join(report['models'])}; pages of {report['page_size']} tokens",
             f"{report['prompts']} prompts, {report['new_tokens']} new tokens each, seed {report['seed']}"]
    lines += [f"two cold runs differ by {report['cold_runs_differ_by']:.2g} nats at most; {report['allowed']:.2g} are "
              f"allowed"] if report["cache_salt"] else [f"{report['allowed']:.2g} nats are allowed"]  # fmt: skip
    lines += ["", f"{'tier':<9}{'prompts':>9}{'with hits':>11}{'tokens':>10}{'hit':>10}{'differences':>13}  verdict"]
    for tier in report["tiers"]:
        lines.append(f"{tier['tier']:<9}{number(tier['prompts']):>9}{number(tier['prompts_hit']):>11}"
                     f"{number(tier['tokens']):>10}{number(tier['tokens_hit']):>10}{number(tier['differences']):>13}"
                     f"  {tier['verdict']}")  # fmt: skip
    for tier in report["tiers"]:
        if tier["first"] is not None:
            lines += ["", *_difference(tier, report["page_size"], len(report["models"]) > 1)]
    lines += ["", *(line for note in report["notes"] for line in wrap(note, 80))] if report["notes"] else []
    bad = [tier["tier"] for tier in report["tiers"] if tier["verdict"] == "wrong"]
    missed = [tier["tier"] for tier in report["tiers"] if tier["verdict"] == "not hit"]
    end = ([f"wrong from: {', '.join(bad)}"] if bad else []) + ([f"no hit from: {', '.join(missed)}"] if missed else [])
    return [*lines, "", "; ".join(end) or "right: answers from every tier are those of the cold server"]


def _difference(tier: dict[str, Any], page: int, several: bool) -> list[str]:
    first = tier["first"]
    says = [repr(one) if one is not None else "the end" for one in (first["says"], first["cold_says"])]
    what = f"it says {says[0]} instead of {says[1]}" if says[0] != says[1] else "a log-probability is off"
    if scores := first["logprob"]:
        what += f"; that of {scores['of']!r} is {scores['hit']:.3f} and was {scores['cold']:.3f}"
    where = first["ends"] if first["ends"].startswith("turn") else f"ends {first['ends']} a page's end"
    model = f"{first['model']}, " if several else ""
    text = (f"{tier['tier']}: the first difference is at token {first['position']}, in page {first['page']}: {what}. "
            f"The prompt ({model}{first['prompt_tokens']} tokens, {first['cached_tokens']} of them hit, {where}) was "
            f"sent {'with others' if first['together'] else 'alone'}. ")  # fmt: skip
    if first["kv_page"] is not None:
        begin = first["kv_page"] * page
        text += f"Answers differ from KV page {first['kv_page']} on (tokens {begin} to {begin + page - 1})."
    return wrap(text, 80)
