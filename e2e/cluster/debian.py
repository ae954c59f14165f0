"""Layers of Debian packages: the base that everything with Python stands on, and what is installed on top of it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

from cluster.build import cache_folder
from cluster.images import Layer, add_folder, add_link, add_text, layer

RELEASE = "bookworm"
BASE = ("python3", "ca-certificates")
_LEFT_OUT = (
    "var/cache/",
    "var/lib/apt/lists/",
    "usr/share/doc/",
    "usr/share/man/",
    "usr/share/locale/",
    "dev/",
    "var/log/",
)
_DEBOOTSTRAP = ["debootstrap", "--variant=minbase", f"--include={','.join(BASE)}", RELEASE]


def base_layer() -> Layer:
    def write(archive: tarfile.TarFile) -> None:
        _add_tree(archive, base_folder())
        archive_user(archive)

    return layer(f"debian {RELEASE} {BASE} 3", write)


def installed_layer(*packages: str) -> Layer:
    """What installing them changes of the base; an overlay shows exactly that."""

    def write(archive: tarfile.TarFile) -> None:
        work = cache_folder() / "work" / "-".join(packages)
        shutil.rmtree(work, ignore_errors=True)
        for name in ("upper", "work", "merged"):
            (work / name).mkdir(parents=True)
        options = f"lowerdir={base_folder()},upperdir={work}/upper,workdir={work}/work"
        install = (
            f"mount -t overlay overlay -o {options} {work}/merged && mount -t proc proc {work}/merged/proc && "
            f"printf '#!/bin/sh\\nexit 101\\n' > {work}/merged/usr/sbin/policy-rc.d && "
            f"chmod +x {work}/merged/usr/sbin/policy-rc.d && chroot {work}/merged sh -c "
            f"'apt-get update -qq && apt-get install -y -qq --no-install-recommends {' '.join(packages)}'"
        )
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["unshare", "--mount", "bash", "-c", install], check=True, env=quiet, stdout=subprocess.DEVNULL)
        _add_tree(archive, work / "upper")
        shutil.rmtree(work)

    return layer(f"debian {RELEASE} {BASE} with {packages} 3", write)


def base_folder() -> Path:
    folder = cache_folder() / f"debian-{RELEASE}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run([*_DEBOOTSTRAP, str(unfinished)], check=True, stdout=subprocess.DEVNULL)
        unfinished.rename(folder)
    return folder


def archive_user(archive: tarfile.TarFile) -> None:
    """Whom the images run as, and where they write; `python` as in the official images."""
    passwd = (base_folder() / "etc" / "passwd").read_text()
    add_text(archive, "etc/passwd", passwd + "nonroot:x:65532:65532:nonroot:/tmp:/usr/sbin/nologin\n")
    add_link(archive, "usr/local/bin/python", "/usr/bin/python3.11")
    add_folder(archive, "storage", 0o777)
    add_folder(archive, "data", 0o777)


def _add_tree(archive: tarfile.TarFile, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        # 0, 0: an overlay's mark for a file that was removed
        special = stat.S_ISCHR(path.lstat().st_mode)
        if not special and not name.startswith(_LEFT_OUT) and name not in ("etc/passwd", "usr/sbin/policy-rc.d"):
            archive.add(path, name, recursive=False)
