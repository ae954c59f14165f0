"""What `helm test` runs: the operator's leader, NATS and Redis answer with certificates of ours, and refuse strangers.

python ready.py https://OPERATOR:8443 tls://NATS:4222 rediss://REDIS:6379
"""

import http.client
import json
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

AUTHORITIES = Path("/etc/rlhfspec-authorities")
DEADLINE_SECONDS = 60.0


def operator_refuses(url: str, tls: ssl.SSLContext) -> str:
    """Only whoever leads is behind this address."""
    place = urlsplit(url)
    asked = http.client.HTTPSConnection(place.hostname, place.port, timeout=5, context=tls)
    asked.request("POST", "/v1/namespaces/none/jobs/none/report", body=b"{}")
    status = asked.getresponse().status
    return "" if status in (401, 403) else f"a report without a token got status {status}, not 401 or 403"


def nats_refuses(url: str, tls: ssl.SSLContext) -> str:
    """It says what it is in the clear, then speaks TLS, as its protocol has it."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=5) as plain:
        info = plain.makefile("rb", buffering=0).readline()
        if not json.loads(info.removeprefix(b"INFO ")).get("tls_required"):
            return "it does not require TLS"
        with tls.wrap_socket(plain, server_hostname=place.hostname) as secure:
            secure.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nPING\r\n')
            answer = secure.recv(4096).decode()
    return "" if "Authorization Violation" in answer else f"a client without credentials is answered with {answer!r}"


def redis_refuses(url: str, tls: ssl.SSLContext) -> str:
    place = urlsplit(url)
    with (
        socket.create_connection((place.hostname, place.port), timeout=5) as plain,
        tls.wrap_socket(plain, server_hostname=place.hostname) as secure,
    ):
        secure.sendall(b"PING\r\n")
        answer = secure.recv(4096).decode()
    return "" if answer.startswith("-NOAUTH") else f"a client without credentials is answered with {answer!r}"


Check = Callable[[str, ssl.SSLContext], str]


def problem_of(check: Check, url: str, tls: ssl.SSLContext) -> str:
    """Empty once it is as it should be; what was wrong until the deadline otherwise."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            problem = check(url, tls)
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem or time.monotonic() > deadline:
            return problem
        time.sleep(1.0)


def main(urls: list[str]) -> int:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for authority in AUTHORITIES.glob("*.pem"):
        tls.load_verify_locations(authority)
    problems = 0
    for check, url in zip((operator_refuses, nats_refuses, redis_refuses), urls, strict=True):
        problem = problem_of(check, url, tls)
        problems += bool(problem)
        print(f"{url}: {problem or 'ready, and refuses clients without credentials'}", flush=True)
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
