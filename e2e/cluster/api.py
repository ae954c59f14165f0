"""The API server by plain HTTP: JSON in, JSON out, as light as a helper beside a test should be."""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


class Api:
    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._server = cluster["server"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._context = ssl.create_default_context(cadata=authority)
        with tempfile.NamedTemporaryFile() as pem:  # ssl reads certificates of clients from files only
            for part in ("client-certificate-data", "client-key-data"):
                pem.write(base64.b64decode(user[part]))
            pem.flush()
            self._context.load_cert_chain(pem.name)

    def get(self, path: str, *, timeout: float = 30) -> Any:
        with self._open(path, timeout) as answer:
            return json.load(answer)

    def watch(self, path: str, version: str) -> Iterator[dict[str, Any]]:
        """Events after that version, until the server ends it; OSError when nothing is heard for too long."""
        ask = f"{path}?watch=1&allowWatchBookmarks=true&timeoutSeconds=240&resourceVersion={version}"
        with self._open(ask, 120) as answer:
            for line in answer:
                yield json.loads(line)

    def _open(self, path: str, timeout: float) -> Any:
        return urllib.request.urlopen(self._server + path, context=self._context, timeout=timeout)
