"""The operator's report endpoint, of a release's servers."""

import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shared_servers import SharedServers
from started import PATIENCE_SECONDS

from rlhfspec.cluster.report import Report


class Operator:
    """Report endpoint over TLS with a token; `answer` may be changed."""

    def __init__(self, servers: SharedServers) -> None:
        secret = servers.release_credentials("operator-tls")
        self.token, self.answer = "first", 200
        self.reports: list[Report] = []
        self.problems: list[str] = []
        self.news = threading.Condition()
        operator = self

        class Taking(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(operator.take(self.headers["Authorization"], body))
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(secret / "tls.crt", secret / "tls.key")
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._http.server_address[1]}/v1/namespaces/team/jobs/letters/report"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def take(self, authorization: str, body: bytes) -> int:
        with self.news:
            if authorization != f"Bearer {self.token}":
                self.problems.append(authorization)
                return 401
            if self.answer == 200:
                self.reports.append(Report.model_validate_json(body))
            self.news.notify_all()
            return self.answer

    def until(self, holds: Callable[[Report], Any], what: str) -> Report:
        """Wait for the first new report for which `holds` is true."""
        end = time.monotonic() + PATIENCE_SECONDS
        with self.news:
            seen = len(self.reports)
            while True:
                for report in self.reports[seen:]:
                    if holds(report):
                        return report
                seen = len(self.reports)
                left = end - time.monotonic()
                assert left > 0, f"no report of {what}; the last: {self.reports[-1:]} {self.problems[-1:]}"
                self.news.wait(left)

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
