"""The door's page, in a real Chromium."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from browser import CHROMIUM, CONTRAST, Page, browser
from chats import TOKEN, Served, chat_engine, serving
from coroutines import until

from rlhfspec.common import web
from rlhfspec.common.web import SHARED
from rlhfspec.door import page as page_module
from rlhfspec.door.page import PAGE_FILES, address
from rlhfspec.runs.folder.run_folder import RunFolder

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium in the PATH (apt-get install chromium)")
ANSWERS = "[...document.querySelectorAll('.answered')].map((each) => each.querySelector('.said').textContent)"
NOTE = "[...document.querySelectorAll('.told')].at(-1).textContent"
IDLE = "!document.querySelector('.running')"


@asynccontextmanager
async def looking(
    folder: Path, *, token: str = TOKEN, dark: bool = False, width: int = 1000, missing: str = "", **options: Any
) -> AsyncIterator[tuple[Page, Served]]:
    """Look at the page with this token in its address. Only `missing` may be complained of."""
    async with serving(chat_engine(**options), run=RunFolder(folder)) as served, browser() as page:
        await page.look_like(width=width, height=800, dark=dark)
        await page.go(address("127.0.0.1", served.server.port or 0, token))
        await page.until("document.body.classList.contains('login') || !document.querySelector('#ask').hidden")
        yield page, served
        assert [each for each in page.complaints if not (missing and missing in each)] == []
        assert {each.split("/")[2] for each in page.requested if each.startswith("http")} == {served.url.split("/")[2]}


async def ask(page: Page, text: str, **settings: Any) -> None:
    for name, value in settings.items():
        await page.value(f"document.querySelector('#{name}').value = '{value}'")
    await page.value(
        f"document.querySelector('#text').value = {json.dumps(text)}; document.querySelector('#text').focus()"
    )
    await page.press("Enter")


@needs_chromium
async def test_a_conversation_is_streamed_voted_on_and_continued(tmp_path: Path) -> None:
    async with looking(tmp_path) as (page, served):
        assert await page.value("location.hash") == ""
        assert await page.value("document.querySelector('#model').textContent") == "tiny · weights 0"
        hostile = "<img src=x onerror=alert(1)>"
        await ask(page, hostile, seed=7, max_tokens=12, temperature=0.5)
        await page.until(f"{ANSWERS}.length == 1 && {IDLE} && document.querySelector('.votes')?.hidden === false")
        assert await page.value("document.querySelectorAll('#talk img').length") == 0
        messages: list[Any] = [{"role": "user", "content": hostile}]
        asked: Any = {"model": "policy", "seed": 7, "max_tokens": 12, "temperature": 0.5}
        whole = await served.client.chat.completions.create(**asked, messages=messages)
        assert await page.value(ANSWERS) == [whole.choices[0].message.content]
        assert (await page.value(NOTE)).startswith(f"weights 0 · seed 7 · {whole.usage.completion_tokens} token")
        await page.value("document.querySelector('[data-vote=up]').focus()")
        await page.press("Enter")
        await page.until("document.querySelector('[data-vote=up]').ariaPressed == 'true'")
        vote = json.loads((tmp_path / "feedback.jsonl").read_text())
        assert (vote["vote"], vote["messages"], vote["token_ids"]) == (
            "up", messages, whole.choices[0].model_dump()["token_ids"],
        )  # fmt: skip
        await ask(page, "and?")
        await page.until(f"{ANSWERS}.length == 2 && {IDLE}")
        assert served.door.conversations.counts["continued"] == 1


@needs_chromium
async def test_an_answer_can_be_stopped_and_a_refusal_is_shown(tmp_path: Path) -> None:
    async with looking(tmp_path, missing="status of 400", max_context=500) as (page, served):
        for stops in ("document.querySelector('#stop').click()", None):
            await ask(page, "2+2=", temperature=0)
            await page.until(f"{ANSWERS}.at(-1) && {NOTE}.includes('token')")
            await (page.press("Escape") if stops is None else page.value(stops))
            await page.until(f"{IDLE} && {NOTE}.includes('stopped')")
            await until(lambda: not served.engine.has_work, "the engine stops")
        assert await page.value(f"{ANSWERS}.length") == 2
        await ask(page, "x" * 3000)
        await page.until("document.querySelector('.told.bad')")
        assert "tokens" in await page.value(NOTE)
        assert await page.value("document.querySelector('#text').value.length") == 3000
        await page.value("document.querySelector('#anew').click()")
        assert await page.value(f"{ANSWERS}.length") == 0


@needs_chromium
async def test_a_visitor_without_the_token_is_asked_for_it_once(tmp_path: Path) -> None:
    async with looking(tmp_path, token="wrong", missing="status of 401") as (page, served):
        await page.until("document.querySelector('#why').textContent.includes('token is wrong')")
        await page.value(
            f"document.querySelector('#token').value = '{TOKEN}'; document.querySelector('#token').focus()"
        )
        await page.press("Enter")
        await page.until("!document.querySelector('#ask').hidden")
        await page.go(served.url)
        await page.until("document.querySelector('#model')?.textContent == 'tiny · weights 0'")


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
async def test_a_narrow_page_needs_no_sideways_scrolling_and_can_be_read(tmp_path: Path, dark: bool) -> None:
    async with looking(tmp_path, dark=dark, width=360) as (page, _):
        await ask(page, "a_very_long_word" * 8, max_tokens=60)
        await page.until(f"{ANSWERS}.length == 1 && {IDLE}")
        assert await page.value("document.documentElement.scrollWidth") <= 360
        assert await page.value(CONTRAST) >= 4.5


async def test_the_page_needs_no_token_and_all_else_does() -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        for path in ("/", *(f"/static/{name}" for name in (*SHARED, *PAGE_FILES))):
            async with session.get(f"{served.url}{path}") as answer:
                assert answer.status == 200
                assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
                assert TOKEN not in await answer.text()
        for path, status in (("/static/none", 404), ("/v1/models", 401), ("/static", 401), ("/feedback", 401)):
            async with session.get(f"{served.url}{path}") as answer:
                assert answer.status == status


def test_the_page_asks_nobody_else_and_runs_no_text() -> None:
    for module, names in ((web, SHARED), (page_module, PAGE_FILES)):
        folder = Path(module.__file__ or "").with_name("static")
        assert {path.name for path in folder.iterdir()} == names.keys()
        for name in names:
            content = (folder / name).read_text()
            assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", content), name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", content)
            assert not re.search(r"\son\w+=|style=|<style", content) or not name.endswith("html"), name


def test_the_token_in_the_address_may_hold_any_character() -> None:
    assert address("127.0.0.1", 80, "a&b #ä") == "http://127.0.0.1:80/#token=a%26b%20%23%C3%A4"
