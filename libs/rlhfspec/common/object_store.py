"""Copies of files between an object store (S3, Google Cloud Storage, Azure) and a local folder.

Credentials come from obstore's variables, such as AWS_ACCESS_KEY_ID, or the machine's identity.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from rlhfspec.errors import InvalidRequest, RLHFSpecError, StorageError, StorageUnavailable

_STORAGE_FIELD = "spec.storage.uri"
MOST_PARTS = 9_000  # stores allow 10,000 per object
PART_BYTES = 8 << 20  # sent at once
NUM_CONNECTIONS = 8
_PATIENCE_SECONDS = 60.0  # for retries of a failing request
REQUEST_SECONDS = 3600.0  # for a whole object, on a slow line
STALLED_READ_SECONDS = 60.0  # for one read
_OF_THE_JOB = ("PermissionDeniedError", "UnauthenticatedError", "InvalidPathError", "UnknownConfigurationKeyError")


class ObjectStore:
    """Thread-safe copier of files between `uri` in a store and the folder `base`, to both of which paths are relative.

    Raises StorageUnavailable, or InvalidRequest if a retry cannot help.
    """

    def __init__(self, uri: str, base: Path, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        from obstore.store import from_url

        self.uri = uri.rstrip("/")
        self.base = base
        with self._errors():
            self._store: Any = from_url(
                self.uri,
                client_options={
                    "timeout": timedelta(seconds=REQUEST_SECONDS),
                    "read_timeout": timedelta(seconds=STALLED_READ_SECONDS),
                    "allow_http": True,  # decided by the endpoint
                },
                retry_config={"max_retries": 100, "retry_timeout": timedelta(seconds=patience_seconds)},
            )

    def sizes(self, *prefixes: str) -> dict[str, int]:
        """Return the sizes in bytes, by name, of objects at or below these prefixes."""
        import obstore

        found: dict[str, int] = {}
        for prefix in dict.fromkeys(prefix.strip("/") for prefix in prefixes):
            with self._errors():
                try:
                    found[prefix] = obstore.head(self._store, prefix)["size"]
                except FileNotFoundError:
                    for page in obstore.list(self._store, prefix=prefix):
                        found |= {each["path"]: each["size"] for each in page}
        folders = {str(folder) for path in found for folder in PurePosixPath(path).parents}
        return {path: size for path, size in found.items() if path not in folders}  # tools may make objects for them

    def at_the_top(self) -> dict[str, int]:
        import obstore

        with self._errors():
            return {each["path"]: each["size"] for each in obstore.list_with_delimiter(self._store)["objects"]}

    def fetch(self, sizes: Mapping[str, int]) -> int:
        """Fetch the named objects that the folder lacks, each whole or not at all; return the bytes copied."""
        missing = {path: size for path, size in sizes.items() if not self._is_there(path, size)}
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            for path, size in missing.items():
                _make_room(self._half(path), size)
            for done in [pool.submit(self._fetch, path, size) for path, size in missing.items()]:
                done.result()
        return sum(missing.values())

    def push(self, files: Iterable[Path]) -> int:
        """Push those files that exist, in this order; return the bytes copied."""
        import obstore

        total = 0
        for file in files:
            try:
                size = file.stat().st_size
                with self._errors():
                    chunk = max(PART_BYTES, -(-size // MOST_PARTS))
                    obstore.put(self._store, self.path_of(file), file, chunk_size=chunk)
            except FileNotFoundError:
                continue
            total += size
        return total

    def remove(self, paths: Iterable[str]) -> None:
        import obstore

        with self._errors():
            for path in paths:  # one by one: some stores hide errors of a bulk delete
                try:
                    obstore.delete(self._store, path)
                except FileNotFoundError:
                    continue

    def path_of(self, file: Path) -> str:
        return file.relative_to(self.base).as_posix()

    def _fetch(self, path: str, size: int) -> None:
        with _writing(self._half(path)), self._half(path).open("rb+") as file:
            for data in self._bytes_of(path):
                file.write(data)
            if file.tell() != size:
                raise StorageUnavailable(self.uri, f"{path} changed while it was read")
        self._half(path).replace(self.base / path)

    def _bytes_of(self, path: str) -> Iterator[bytes]:
        import obstore

        with self._errors():
            try:
                yield from obstore.get(self._store, path).stream()
            except FileNotFoundError:
                raise StorageUnavailable(self.uri, f"{path} was removed while it was read") from None

    def _half(self, path: str) -> Path:
        file = self.base / path
        return file.with_name(f".fetching-{file.name}")

    def _is_there(self, path: str, size: int) -> bool:
        file = self.base / path
        return file.is_file() and file.stat().st_size == size

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        text = _first_line(error)
        if "NoSuchBucket" in str(error):
            raise InvalidRequest(_STORAGE_FIELD, self.uri, "the bucket does not exist") from None
        if isinstance(error, FileNotFoundError):  # the caller handles it
            raise error
        is_of_the_job = isinstance(error, ValueError) or type(error).__name__ in _OF_THE_JOB
        if is_of_the_job or re.match(r"Generic (Config error|\w+ error: Missing )", text):
            raise InvalidRequest(_STORAGE_FIELD, self.uri, f"the store refuses: {text}") from None
        raise StorageUnavailable(self.uri, text) from None


def main() -> int:
    """Fetch a file or folder, for a shell without the store's own tool."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhfspec.common.object_store", description="Downloads a file or folder from an object store."
    )
    parser.add_argument("uri", metavar="URI", help="such as s3://bucket/team")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="local copy")
    parser.add_argument("path", metavar="PATH", type=Path, help="file or folder within FOLDER to fetch")
    arguments = parser.parse_args()
    try:
        store = ObjectStore(arguments.uri, arguments.folder)
        sizes = store.sizes(store.path_of(arguments.path))
        if not sizes:
            raise StorageError(arguments.uri, f"there is nothing at {arguments.path}")
        print(f"{len(sizes)} files, {store.fetch(sizes)} bytes")
    except RLHFSpecError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _make_room(file: Path, size: int) -> None:
    """Allocate the file, so that a full disk is noticed before hours of fetching."""
    with _writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as empty:
            if size:
                os.posix_fallocate(empty.fileno(), 0, size)


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(file, f"cannot be written: {error.strerror}") from error


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n\nDebug source")[0]
    return " ".join(text.split())[:500]


if __name__ == "__main__":
    raise SystemExit(main())
