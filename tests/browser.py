"""A headless Chromium, driven over the DevTools protocol."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
    "--disable-background-timer-throttling", "--disable-renderer-backgrounding", "--hide-scrollbars",
)  # fmt: skip
SECONDS = 60.0
# The least contrast of a text's color and what it stands on, by WCAG's formula.
CONTRAST = """(() => {
  const light = (color) => { const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3)
    .map((each) => each / 255).map((each) => each <= .03928 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const back = (element) => getComputedStyle(element).backgroundColor;
  const under = (element) => element === null ? "rgb(255, 255, 255)"
    : back(element).endsWith(", 0)") ? under(element.parentElement) : back(element);
  const ratios = [...document.querySelectorAll("main *, header *, form *")]
    .filter((each) => [...each.childNodes].some((node) => node.nodeType == 3 && node.textContent.trim()))
    .map((each) => [light(getComputedStyle(each)[each.closest("svg") ? "fill" : "color"]), light(under(each))])
    .map(([one, two]) => (Math.max(one, two) + .05) / (Math.min(one, two) + .05));
  return Math.min(...ratios);
})()"""


class Page:
    """A page. `complaints`: console errors, script errors and violations of the content security policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        async with asyncio.timeout(SECONDS):
            return await answer

    async def hear(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if "error" in said and not answer.done():
                    answer.set_exception(RuntimeError(said["error"]["message"]))
                elif not answer.done():
                    answer.set_result(said["result"])
            else:
                self._happened(said["method"], said["params"])

    def _happened(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["exception"].get("description", "an exception"))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    async def attach(self) -> None:
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def look_like(self, *, width: int, height: int, dark: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def _is_true(self, script: str) -> bool:
        try:
            return bool(
                await self.value(f"(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()")
            )
        except RuntimeError as error:
            if "navigated" not in str(error):
                raise
            return False

    async def until(self, script: str, seconds: float = SECONDS) -> None:
        """Wait until the script's value is truthy. A missing element is no error."""
        try:
            async with asyncio.timeout(seconds):
                while not await self._is_true(script):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.value("document.body.innerText.slice(0, 2000)")
            raise AssertionError(f"never true: {script}\nthe page shows:\n{shown}\n{self.complaints}") from None

    async def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more
            )


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, f"--user-data-dir={home}", "about:blank",
            stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(SECONDS):
                while not (line := (await process.stderr.readline()).decode()).startswith("DevTools listening on "):
                    assert line, "Chromium ended"
            draining = asyncio.create_task(_drain(process.stderr))
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(line.split()[-1], max_msg_size=0) as socket,
            ):
                page = Page(socket)
                hearing = asyncio.create_task(page.hear())
                await page.attach()
                yield page
                hearing.cancel()
            draining.cancel()
        finally:
            process.terminate()
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
