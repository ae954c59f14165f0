"""The dashboard in a real Chromium renders and updates pages without complaints, and text stays text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from browser import CHROMIUM, CONTRAST, Page, browser
from dashboards import HOSTILE, TOKEN, LiveRun, load, many_snapshots, moved, report, served, snapshot, write_run

from rlhfspec.dashboard.jobs.laptop import LaptopSource
from rlhfspec.runs.live.live import RecentLines

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium in the PATH (apt-get install chromium)")


@asynccontextmanager
async def looking(
    folder: Path, *, width: int = 1300, height: int = 1000, dark: bool = False, missing: str = ""
) -> AsyncIterator[tuple[Page, LiveRun]]:
    """Look at a live run. Only `missing` may be complained of, and only the server be contacted."""
    async with LiveRun(folder) as live, served(LaptopSource([folder])) as (_, url), browser() as page:
        await page.look_like(width=width, height=height, dark=dark)
        await page.go(f"{url}/?token={TOKEN}")
        await page.until("document.querySelector('a[href=\"#/laptop/run\"]')")
        yield page, live
        assert [each for each in page.complaints if not (missing and missing in each)] == []
        assert {each.split("/")[2] for each in page.requested if each.startswith("http")} == {url.split("/")[2]}


async def open_job(page: Page) -> None:
    await page.value("location.hash = '#/laptop/run'")
    await page.until("document.querySelectorAll('.chart path.line').length >= 7")
    await page.until("document.querySelector('.tiles') && !document.querySelector('.note')")  # it listens


async def test_curves_generators_and_moves_appear_as_they_happen(tmp_path: Path) -> None:
    async with looking(write_run(tmp_path / "run", finished=False)) as (page, live):
        await open_job(page)
        points = "document.querySelector('.chart path.line').getAttribute('d').split(/[ML]/).length - 1"
        assert await page.value(points) == 3
        await live.say(load(0, running=7), load(1), report(4))
        await page.until(f"{points} == 4")
        await page.until("document.querySelector('.loads')?.innerText.includes('7+1')")
        await live.say(moved(1))
        await page.until("document.querySelector('.arc path')")
        await page.until("document.querySelector('.moved')?.innerText.includes('with its KV')")
        assert await page.value("document.getElementById('link').textContent") == "live"


async def test_charts_have_units_and_the_job_shows_yaml_and_run_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    async with looking(folder) as (page, _):
        await open_job(page)
        await page.until("document.querySelectorAll('.chart path.line').length >= 7")
        found = await page.value("[...document.querySelectorAll('.chart .unit')].map((each) => each.textContent)")
        assert found[1::2] == ["step"] * 7
        assert len(set(found[::2])) == 6, "KL and entropy share one"
        assert all(found)
        assert str(folder) in await page.value("document.querySelector('.links').textContent")
        shown = await page.value("fetch(document.querySelector('.links a').href).then((answer) => answer.text())")
        assert "kind: RLHFJob" in shown


async def test_every_page_can_be_reached_by_keyboard(tmp_path: Path) -> None:
    async with looking(write_run(tmp_path / "run", finished=False)) as (page, _):
        for _ in range(12):
            await page.press("Tab")
            if await page.value("document.activeElement.getAttribute('href') == '#/laptop/run'"):
                break
        await page.press("Enter")
        await page.until("document.querySelectorAll('.chart path.line').length >= 7")
        for _ in range(12):
            await page.press("Tab")
            if await page.value("document.activeElement.className == 'area'"):
                break
        await page.press("Home")
        await page.until("document.querySelector('.readout').textContent.includes('step 1')")
        await page.press("ArrowRight")
        await page.until("document.querySelector('.readout').textContent.includes('step 2')")
        assert await page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"


async def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, texts=HOSTILE, finished=False)
    async with looking(folder, missing="api/jobs/%3Cimg") as (page, live):  # its 404s come when they come
        recent = RecentLines()
        for place, text in enumerate(HOSTILE):
            recent.sample(f"sums/4/{place}/0", text, "<b>bold</b>")
        live.show(window=recent.now())
        live.show(*snapshot(0, what=HOSTILE[0]))
        await open_job(page)
        await page.until("document.querySelectorAll('.samples').length == 2")
        await page.until("document.body.innerText.includes('<b>bold</b>')")
        for place in range(len(HOSTILE)):
            await page.value(f"location.hash = '#/laptop/run/sums%2F1%2F{place}%2F0'")
            await page.until(
                f"document.querySelector('h1')?.textContent == 'sums/1/{place}/0' && document.querySelector('pre')"
            )
            assert await page.value("document.querySelectorAll('main script, main img, main pre *').length") == 0
        assert "taken" not in await page.value("document.title")
        await page.value("location.hash = '#/%3Cimg src=x onerror=alert(1)%3E/%E0%A4%A'")
        await page.until("document.querySelector('#link').className == 'away'")
        page.complaints.clear()  # the 404 of that job that is not there
        await page.value("location.hash = '#/'")
        await page.until("document.querySelector('a[href=\"#/laptop/run\"]')")


async def test_a_sample_shows_where_its_time_went(tmp_path: Path) -> None:
    async with looking(write_run(tmp_path / "run", finished=False)) as (page, _):
        await page.value("location.hash = '#/laptop/run/sums%2F1%2F0%2F0'")
        await page.until("document.querySelectorAll('.waterfall tbody tr').length == 4")
        assert await page.value("document.querySelectorAll('.piece.work').length") >= 4


@pytest.mark.parametrize("dark", [False, True])
async def test_a_narrow_screen_needs_no_sideways_scrolling_and_texts_can_be_read(tmp_path: Path, dark: bool) -> None:
    async with looking(write_run(tmp_path / "run", finished=False), width=360, height=740, dark=dark) as (page, live):
        await open_job(page)
        await live.say(load(0), load(1))
        await page.until("document.querySelector('.loads')")
        assert await page.value("document.documentElement.scrollWidth") <= 360
        assert await page.value(CONTRAST) >= 4.5


async def test_200_generators_do_not_choke_the_page(tmp_path: Path) -> None:
    async with looking(write_run(tmp_path / "run", finished=False)) as (page, live):
        live.show(*many_snapshots(200, owned=10_000))
        await open_job(page)
        await page.until("document.querySelectorAll('.cells li').length == 200")
        await page.call("Performance.enable")
        before = await busy_seconds(page)
        for number in range(5):
            await live.say(*(load(worker, at=number, running=number + 1) for worker in range(200)))
            await live.say(*(moved(200 * number + each) for each in range(200)))
            running = f"{200 * (number + 1):,} samples running"
            await page.until(f"document.querySelector('.total')?.textContent.includes('{running}')")
        used = await busy_seconds(page) - before
        print(f"200 generators, 1,000 loads, 1,000 moves: {used:.2f} s of the page's thread")
        assert used < 4.0
        assert await page.value("document.querySelectorAll('*').length") < 4000


async def busy_seconds(page: Page) -> float:
    metrics = (await page.call("Performance.getMetrics"))["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


async def test_a_visitor_without_a_token_sees_only_the_login(tmp_path: Path) -> None:
    async with looking(write_run(tmp_path / "run", finished=False)) as (page, _):
        await page.value("document.querySelector('form button').click()")
        await page.until("location.pathname == '/login' && document.querySelector('#token')")
        await page.value("document.querySelector('#token').value = 'wrong'; document.querySelector('form').submit()")
        await page.until(
            "location.hash == '#refused' && getComputedStyle(document.querySelector('#refused')).display == 'block'"
        )
        await page.value(f"document.querySelector('#token').value = '{TOKEN}'; document.querySelector('form').submit()")
        await page.until("document.querySelector('a[href=\"#/laptop/run\"]')")
        assert await page.value("document.cookie") == ""
