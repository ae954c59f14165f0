"""A real S3 server for tests: rclone's, over a local folder."""

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

from shared_servers import free_port

BINARY = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
KEY, SECRET = "a-key", "a-secret"


class ObjectServer:
    """S3 server whose buckets are subfolders of `folder`. It may be restarted on the same port."""

    def __init__(self, folder: Path, *, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.port = free_port()
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "bucket").mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }  # fmt: skip

    def start(self) -> None:
        command = [BINARY, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", f"{self._host}:{self.port}"]
        command += ["--config", "", str(self.folder)]
        with (self.folder.parent / "rclone.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < end, "rclone does not answer"
            assert self._process.poll() is None, (self.folder.parent / "rclone.log").read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=5).close()
        except urllib.error.HTTPError:
            return True  # who shows no key is refused
        except OSError:
            return False
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
