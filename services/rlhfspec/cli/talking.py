"""Client of doors for people at a terminal: policies, their streamed answers, votes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar

import aiohttp

from rlhfspec.errors import PlacedError, RLHFSpecError, first_line
from rlhfspec.runs.view.text import one_line

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Partner:
    """A policy to talk to, at the door with this URL."""

    title: str
    url: str  # without /v1
    token: str
    model: str = "policy"
    takes_feedback: bool = True


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come."""

    partner: Partner
    id: str = ""
    text: str = ""
    seed: int | None = None
    versions: list[int] = field(default_factory=list)  # one a token
    is_whole: bool = False
    problem: str = ""
    begun: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def note(self) -> str:
        """Return what there is to know about the answer beside its text."""
        version = f"weights {'-'.join(map(str, sorted(set(self.versions))))}" if self.versions else ""
        speed = f"{len(self.versions)} tokens, {len(self.versions) / self.seconds:.0f}/s" if self.versions else ""
        seed = "" if self.seed is None else f"seed {self.seed}"
        return " · ".join(each for each in (version, seed, speed, "" if self.is_whole else "not finished") if each)

    def take(self, chunk: dict[str, Any]) -> str:
        """Add a chunk of the stream, and return its text."""
        self.id = chunk["id"]
        text = ""
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            self.seed = choice.get("seed")
            self.versions += choice.get("weights_versions") or ()
        self.text += text
        self.seconds = time.monotonic() - self.begun
        return text


class Talking:
    """Event loop in a thread, with an HTTP session, so that Ctrl-C in the main thread ends one answer only."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="talking", daemon=True)
        self._thread.start()
        self._session = self.wait(_session())

    def wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop. Ctrl-C cancels it."""
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result()
        except KeyboardInterrupt:
            running.cancel()
            raise

    def close(self) -> None:
        self.wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def at(self, url: str, token: str) -> Partner:
        """Return the first model of an OpenAI-compatible server."""
        at = url.rstrip("/").removesuffix("/v1")
        try:
            card = self.wait(self._call("GET", f"{at}/v1/models", token))["data"][0]
        except (ValueError, LookupError, TypeError) as error:
            raise PlacedError(url, f"is not an OpenAI-compatible server: {first_line(error)}") from error
        return Partner(card.get("root") or card["id"], at, token, card["id"], card.get("takes_feedback", False))

    def ask(self, answers: Sequence[Answer], body: dict[str, Any], say: Callable[[str], None]) -> None:
        """Fill answers from their partners, all at once. `say` gets each new piece of text."""
        self.wait(self._ask_all(answers, body, say))

    def vote(self, answer: Answer, vote: str, *, against: Answer | None) -> None:
        body = {"id": answer.id, "vote": vote, "against": None if against is None else against.id}
        self.wait(self._call("POST", f"{answer.partner.url}/feedback", answer.partner.token, body))

    async def _ask_all(self, answers: Sequence[Answer], body: dict[str, Any], say: Callable[[str], None]) -> None:
        await asyncio.gather(*(self._ask(answer, body, say) for answer in answers))

    async def _ask(self, answer: Answer, body: dict[str, Any], say: Callable[[str], None]) -> None:
        try:
            await self._stream(answer, body, say)
        except (RLHFSpecError, aiohttp.ClientError) as error:
            answer.problem = str(error)
        except (ValueError, LookupError, TypeError) as error:
            answer.problem = f"{answer.partner.url} is not an OpenAI-compatible server: {first_line(error)}"

    async def _stream(self, answer: Answer, body: dict[str, Any], say: Callable[[str], None]) -> None:
        partner = answer.partner
        url = f"{partner.url}/v1/chat/completions"
        asked = {**body, "model": partner.model, "stream": True}
        answer.begun = time.monotonic()
        async with self._open("POST", url, partner.token, asked) as response:
            await _refuse(url, response)
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == line.strip():  # a comment, or the end of an event
                    continue
                if data == b"[DONE]":
                    answer.is_whole = True
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RLHFSpecError(chunk["error"]["message"])
                say(answer.take(chunk))
                await asyncio.sleep(0)  # lets Ctrl-C in, however much has arrived
        raise PlacedError(url, "broke off")

    async def _call(self, method: str, url: str, token: str, body: Any = None) -> Any:
        try:
            async with self._open(method, url, token, body) as response:
                await _refuse(url, response)
                return await response.json()
        except aiohttp.ClientError as error:
            raise PlacedError(url, first_line(error)) from error

    def _open(self, method: str, url: str, token: str, body: Any) -> Any:
        return self._session.request(method, url, json=body, headers={"Authorization": f"Bearer {token}"})


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=30))


async def _refuse(url: str, response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        text = await response.text()
        with suppress(ValueError, KeyError, TypeError):  # of a server that is no door
            text = json.loads(text)["error"]["message"]
        raise PlacedError(url, f"answers {response.status}: {one_line(text)}")
