"""Page to chat in a browser. It holds no secret: its visitor brings the token."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from aiohttp import web

from rlhfspec.common.web import HEADERS, StaticFiles

PAGE_FILES = {"chat.html": "text/html", "chat.css": "text/css", "chat.js": "text/javascript"}


class ChatPage:
    """The page `/` and its files."""

    def __init__(self) -> None:
        self._files = StaticFiles("rlhfspec.door", PAGE_FILES)

    def routes(self) -> Sequence[web.RouteDef]:
        return [web.get("/", self._file), web.get("/static/{name}", self._file)]

    @staticmethod
    def is_at(path: str) -> bool:
        return path == "/" or path.startswith("/static/")

    async def _file(self, request: web.Request) -> web.Response:
        answer = self._files.answer(request, request.match_info.get("name", "chat.html"))
        answer.headers.update(HEADERS)
        return answer


def address(host: str, port: int, token: str) -> str:
    """Return the page's address with the token in its fragment, which a browser never sends."""
    return f"http://{host}:{port}/#token={quote(token, safe='')}"
