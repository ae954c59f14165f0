"""What has to be on a machine; each answer is the reason for a skip, or "" when nothing is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from cluster.build import folder_of, missing

DEBIAN_PACKAGES = (
    "containerd runc containernetworking-plugins busybox-static iptables conntrack debootstrap iproute2",
    "gcc libc6-dev binutils",
)
_COMMANDS = ("containerd", "ctr", "runc", "busybox", "iptables", "conntrack", "debootstrap", "ip", "nsenter", "gcc")


def why_no_control_plane() -> str:
    return f"{', '.join(missing())} not built: make e2e-tools" if missing() else ""


def why_no_kueue() -> str:
    return (
        "" if (folder_of("kueue") / "kueue").exists() else "kueue not built: python e2e/cluster/build.py --with kueue"
    )


def why_no_nodes() -> str:
    if reason := why_no_control_plane():
        return reason
    if os.geteuid():
        return "nodes need root: namespaces, mounts, cgroups"
    absent = [name for name in _COMMANDS if shutil.which(name) is None]
    absent += [] if Path("/usr/lib/cni/bridge").exists() else ["/usr/lib/cni/bridge"]
    if absent:
        return f"{', '.join(absent)} not here: apt-get install {' '.join(DEBIAN_PACKAGES)}"
    tried = subprocess.run(
        [
            "unshare",
            "--mount",
            "--net",
            "--pid",
            "--fork",
            "sh",
            "-c",
            "mount -t tmpfs tmpfs /opt && ip link set lo up",
        ],
        capture_output=True,
        text=True,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""
