"""The images that tests run."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

from cluster import debian, packages
from cluster.build import binaries_folder
from cluster.images import Image, Layer, add_file, add_folder, add_link, layer

USER = "65532:65532"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "PYTHONPATH": f"/{packages.CODE}:/{packages.SITE}",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/tmp",
}
_KERNELS = {"RLHFSPEC_KERNEL_LIBRARY": "/opt/rlhfspec/kernels.so"}
_APPLETS = ("sh", "sleep", "cat", "ls", "nc", "httpd", "nslookup", "true", "false", "echo", "dd", "env", "tar", "touch")


def pause() -> Image:
    """What holds a pod's network; with a few commands, for pods that only wait, ask or answer."""
    busybox = Path(shutil.which("busybox") or "/bin/busybox")

    def write(archive: tarfile.TarFile) -> None:
        add_folder(archive, "tmp", 0o1777)
        add_file(archive, busybox, "bin/busybox")
        for name in _APPLETS:
            add_link(archive, f"bin/{name}", "busybox")

    return Image("localhost/pause:1", (layer(f"pause 3 {_APPLETS}", write),), ("/bin/sleep", "1000000000"))


def coredns() -> Image:
    return Image("localhost/coredns:1", (_of_one_binary("coredns"),), ("/coredns",))


def nats() -> Image:
    return Image("localhost/nats:2.12", (_of_one_binary("nats-server"),), ("/nats-server",), user=USER)


def redis() -> Image:
    layers = (debian.base_layer(), debian.installed_layer("redis-server"))
    return Image("localhost/redis:7", layers, ("/usr/bin/redis-server",), _ENVIRONMENT, USER, "/data")


def slim() -> Image:
    """Without torch, and without our code: see `with_code`."""
    layers = (debian.base_layer(), packages.site_layer(packages.SLIM))
    return Image("localhost/rlhfspec:slim", layers, ("python",), _ENVIRONMENT, USER, "/storage")


def cpu() -> Image:
    layers = (debian.base_layer(), packages.site_layer(packages.FULL))
    return Image("localhost/rlhfspec:cpu", layers, ("python",), _ENVIRONMENT | _KERNELS, USER, "/storage")


def with_code(image: Image) -> Image:
    """Ours as it is now. It changes often: it is imported at every start, its base once for all."""
    kernels = (packages.kernels_layer(),) if image.environment.keys() & _KERNELS.keys() else ()
    return replace(image, layers=(*image.layers, *kernels, packages.code_layer()))


MAKERS = {"nats": nats, "redis": redis, "slim": slim, "cpu": cpu}


def is_ours(image: Image) -> bool:
    return image.name.startswith("localhost/rlhfspec:")


def _of_one_binary(name: str) -> Layer:
    """By content: the same program, built again in another folder, is the same layer."""
    with (binaries_folder() / name).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return layer(f"{name} {digest}", lambda archive: add_file(archive, binaries_folder() / name, name))
