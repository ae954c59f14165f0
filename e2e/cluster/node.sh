#!/bin/bash
# One node, as the first process of its own process, mount and network namespaces: when it is killed, everything of
# the node is gone, pods and mounts included. Arguments: the node's folder, its cgroup, the binaries, an archive of images.
set -eu
node=$1 cgroup=$2 binaries=$3 images=$4

# Containers see what is mounted later (their volumes); this machine does not.
mount --make-rshared /
# What containerd, kubelet and plugins write at fixed places goes with the node.
for place in /run /var/lib /var/log /opt; do mount -t tmpfs tmpfs "$place"; done
mkdir -p /run/netns /var/lib/kubelet/device-plugins "$node/device-plugins"
mount --bind "$node/device-plugins" /var/lib/kubelet/device-plugins
# The kubelet sets three switches of the whole machine: let it set these instead.
for switch in vm/overcommit_memory kernel/panic kernel/panic_on_oops; do
  copy=$node/${switch#*/}
  cat "/proc/sys/$switch" > "$copy"
  mount --bind "$copy" "/proc/sys/$switch"
done

if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
  mkdir -p "/sys/fs/cgroup/$cgroup"
  for group in /sys/fs/cgroup "/sys/fs/cgroup/$cgroup"; do
    for controller in $(cat "$group/cgroup.controllers"); do
      # refused where this machine is itself a container; the kubelet then says which it misses
      echo "+$controller" > "$group/cgroup.subtree_control" || true
    done
  done
else
  for hierarchy in /sys/fs/cgroup/*/; do
    mkdir -p "$hierarchy$cgroup"
    for setting in cpuset.cpus cpuset.mems; do
      if [[ -e $hierarchy$cgroup/$setting ]]; then cat "$hierarchy$setting" > "$hierarchy$cgroup/$setting"; fi
    done
  done
fi

# What all nodes' image stores share, read-only: see images.py.
if [[ -e $node/shared-snapshots ]]; then
  shared=$(cat "$node/shared-snapshots")
  for snapshot in "$shared"/*/; do
    mount --bind -o ro "$snapshot" "$node/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/$(basename "$snapshot")"
  done
fi

containerd --config "$node/containerd.toml" > "$node/containerd.log" 2>&1 &
until [[ -S $node/containerd.sock ]] && ctr -a "$node/containerd.sock" version > /dev/null 2>&1; do sleep 0.05; done
ctr -a "$node/containerd.sock" -n k8s.io images import "$images"
until [[ -e $node/join ]]; do sleep 0.05; done
"$binaries/kube-proxy" --config "$node/kube-proxy.json" > "$node/kube-proxy.log" 2>&1 &
AWS_EC2_METADATA_DISABLED=true "$binaries/kubelet" --config "$node/kubelet.json" \
  --kubeconfig "$node/kubelet.kubeconfig" --root-dir "$node/kubelet" --cert-dir "$node/kubelet-keys" \
  --hostname-override "$(basename "$node")" --node-ip "$(cat "$node/address")" > "$node/kubelet.log" 2>&1 &
wait -n
echo "a part of the node ended"
exit 1
