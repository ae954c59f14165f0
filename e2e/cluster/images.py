"""Images without an image builder: layers as tar files, and archives (OCI layout) that containerd imports.

A layer is made once and kept in the cache folder by its key; an archive may leave out layers that the node has.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.build import alone, cache_folder


@dataclass(frozen=True)
class Layer:
    tar: Path
    digest: str  # sha256 of the tar, which is also what containerd calls it

    @property
    def size(self) -> int:
        return self.tar.stat().st_size


@dataclass(frozen=True)
class Image:
    """`entrypoint`, `command`, `environment` and `user` as in a Dockerfile."""

    name: str
    layers: tuple[Layer, ...]
    entrypoint: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    folder: str = "/"

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)


def layer(key: str, write: Callable[[tarfile.TarFile], None]) -> Layer:
    """The layer of that key, written if it is not in the cache."""
    folder = cache_folder() / "layers"
    folder.mkdir(parents=True, exist_ok=True)
    tar = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.tar"
    digest = tar.with_suffix(".sha256")
    if not (tar.exists() and digest.exists()):
        with alone(f"layers/{tar.stem}"):
            if not (tar.exists() and digest.exists()):
                _write_layer(tar, digest, write)
    for path in (tar, digest):
        os.utime(path)  # in use: image_store.py removes what is not
    return Layer(tar, digest.read_text())


def _write_layer(tar: Path, digest: Path, write: Callable[[tarfile.TarFile], None]) -> None:
    unfinished = tar.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w", format=tarfile.PAX_FORMAT) as archive:
        write(archive)
    with unfinished.open("rb") as stream:
        digest_now = hashlib.file_digest(stream, "sha256").hexdigest()
    unfinished.rename(tar)
    digest.write_text(digest_now)


def add_file(archive: tarfile.TarFile, source: Path, name: str) -> None:
    """As root's, without the time: the same file gives the same layer."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info

    archive.add(source, name.lstrip("/"), recursive=False, filter=plain)


def add_text(archive: tarfile.TarFile, name: str, text: str | bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name.lstrip("/"))
    content = text.encode() if isinstance(text, str) else text
    info.size, info.mode = len(content), mode
    archive.addfile(info, io.BytesIO(content))


def add_folder(archive: tarfile.TarFile, name: str, mode: int = 0o755) -> None:
    info = tarfile.TarInfo(name.lstrip("/"))
    info.type, info.mode = tarfile.DIRTYPE, mode
    archive.addfile(info)


def add_link(archive: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name.lstrip("/"))
    info.type, info.linkname = tarfile.SYMTYPE, target
    archive.addfile(info)


def write_archive(path: Path, images: Iterable[Image], *, without: frozenset[str] = frozenset()) -> Path:
    """`without`: digests of layers that are there already, where it will be imported."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written: set[str] = set(without)
    manifests = []
    with tarfile.open(path, "w") as archive:
        add_text(archive, "oci-layout", '{"imageLayoutVersion": "1.0.0"}')
        for image in images:
            for each in image.layers:
                if each.digest not in written:
                    archive.add(each.tar, f"blobs/sha256/{each.digest}")
                    written.add(each.digest)
            manifests.append(_write_manifest(archive, image))
        add_text(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": manifests}))
    return path


def _write_manifest(archive: tarfile.TarFile, image: Image) -> dict[str, Any]:
    """Returns its descriptor for the index."""

    def blob(value: dict[str, Any], kind: str) -> dict[str, Any]:
        text = json.dumps(value, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        add_text(archive, f"blobs/sha256/{digest}", text)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(text)}

    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": list(image.entrypoint),
            "Env": [f"{name}={value}" for name, value in image.environment.items()],
            "User": image.user,
            "WorkingDir": image.folder,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{each.digest}" for each in image.layers]},
    }
    kind = "application/vnd.oci.image.layer.v1.tar"
    layers = [{"mediaType": kind, "digest": f"sha256:{each.digest}", "size": each.size} for each in image.layers]
    manifest = blob(
        {"schemaVersion": 2, "config": blob(config, "config.v1+json"), "layers": layers}, "manifest.v1+json"
    )
    return manifest | {"annotations": {"io.containerd.image.name": image.name}}
