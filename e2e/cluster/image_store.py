"""Image stores that nodes begin with, so that no node imports what another has imported.

A store is a containerd's root folder made once for a set of images and never changed again. A node's own root begins
as a copy: the databases really copied, blobs as hard links, unpacked layers mounted read-only (node.sh).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.build import alone, cache_folder
from cluster.images import Image, write_archive
from cluster.processes import last_lines

BLOBS = "io.containerd.content.v1.content"
METADATA = "io.containerd.metadata.v1.bolt"
SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs"

_CONFIG = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{folder}/containerd.sock"
"""
_IMPORT = """
set -eu
for place in /run /var/lib; do mount -t tmpfs tmpfs $place; done
containerd --config {folder}/config.toml > {folder}/log 2>&1 & server=$!
until [[ -S {folder}/containerd.sock ]] && ctr -a {folder}/containerd.sock version > /dev/null 2>&1; do sleep 0.1; done
ctr -a {folder}/containerd.sock -n k8s.io images import {folder}/images.tar
kill $server; wait $server || true
"""


def store_of(images: Sequence[Image]) -> Path:
    """The folder of the store that has these images, made if there is none: 2 GB take a minute."""
    names = sorted((image.name, *(layer.digest for layer in image.layers)) for image in images)
    stores = cache_folder() / "stores"
    store = stores / hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]
    with alone("stores"):
        if not store.exists():
            _make(store, images)
            _remove_unused(stores)
    os.utime(store)
    return store


def _make(store: Path, images: Sequence[Image]) -> None:
    folder = store.with_suffix(".unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(_CONFIG.format(folder=folder))
    # Under other names: `localhost/rlhfspec:cpu` is the one with code.
    write_archive(folder / "images.tar", [replace(image, name=_base_name(image)) for image in images])
    script = ["bash", "-c", _IMPORT.format(folder=folder)]
    command = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"importing images: {done.stderr}\n{last_lines(folder / 'log')}")
    (folder / "images.tar").unlink()
    for layer in {layer for image in images for layer in image.layers}:
        # the blob is the very same file: once on the disk is enough
        blob = folder / "root" / BLOBS / "blobs" / "sha256" / layer.digest
        same = layer.tar.with_suffix(".same")
        same.hardlink_to(blob)
        same.rename(layer.tar)
    folder.rename(store)


def _remove_unused(stores: Path, *, days: float = 7) -> None:
    """Those, and layers, that nobody has asked for in a week."""
    long_ago = time.time() - days * 24 * 3600
    for path in [*stores.iterdir(), *(stores.parent / "layers").iterdir()]:
        if path.stat().st_mtime < long_ago:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def copy_store(store: Path, node: Path) -> None:
    """Makes `node`/containerd from a store, and says in `node`/shared-snapshots what is to be mounted."""
    source, root = store / "root", node / "containerd"
    snapshots = root / SNAPSHOTS / "snapshots"
    snapshots.mkdir(parents=True)
    for snapshot in (source / SNAPSHOTS / "snapshots").iterdir():
        (snapshots / snapshot.name).mkdir()
    shutil.copy(source / SNAPSHOTS / "metadata.db", root / SNAPSHOTS)
    shutil.copytree(source / METADATA, root / METADATA)
    subprocess.run(["cp", "--archive", "--link", str(source / BLOBS), str(root / BLOBS)], check=True)
    (node / "shared-snapshots").write_text(str(source / SNAPSHOTS / "snapshots"))


def _base_name(image: Image) -> str:
    return image.name.replace("localhost/", "localhost/base/")
