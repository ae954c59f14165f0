"""One bridge, one network namespace a node, and the cable between them, which can be pulled."""

from __future__ import annotations

import subprocess

from cluster.instance import Instance


def run(*command: str, stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def make_bridge(instance: Instance) -> None:
    run("ip", "link", "add", instance.bridge, "type", "bridge")
    run("ip", "address", "add", f"{instance.host_address}/24", "dev", instance.bridge)
    run("ip", "link", "set", instance.bridge, "up")


def connect(instance: Instance, nodes: list[int]) -> None:
    """Makes every node's namespace and tells all, this machine included, the way to everybody's pods."""
    for node in nodes:
        _make_namespace(instance, node)
    for node in nodes:
        way = [instance.pod_subnet(node), "via", instance.node_address(node)]
        run("ip", "route", "add", *way)
        for other in nodes:
            if other != node:
                run("ip", "-n", instance.namespace(other), "route", "add", *way)
    # This machine sees Services through the first node's kube-proxy.
    run("ip", "route", "add", instance.services, "via", instance.node_address(nodes[0]))


def _make_namespace(instance: Instance, node: int) -> None:
    name, link = instance.namespace(node), instance.link(node)
    run("ip", "netns", "add", name)
    run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", link, "master", instance.bridge, "up")
    inside = ["ip", "-n", name]
    run(*inside, "link", "set", "lo", "up")
    run(*inside, "address", "add", f"{instance.node_address(node)}/24", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    run(*inside, "route", "add", "default", "via", instance.host_address)
    # Without the second, two pods of one node would talk past iptables: past Services and past NetworkPolicies.
    settings = "net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1"
    run("ip", "netns", "exec", name, "sysctl", "-q", "-w", *settings)


def cut(instance: Instance, node: int) -> None:
    """The node goes on, but nobody hears it."""
    run("ip", "link", "set", instance.link(node), "down")


def heal(instance: Instance, node: int) -> None:
    run("ip", "link", "set", instance.link(node), "up")
