"""A cluster to look into: `python -m cluster --instance 3 up`, later `down`."""

from __future__ import annotations

import argparse
import time

from cluster.guardian import clean
from cluster.instance import Instance
from cluster.whole import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    parser.add_argument("--instance", type=int, default=9, help="0 to 9; tests take the lowest that is free")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--images", default="", help="of nats,redis,slim,cpu, with commas")
    parser.add_argument("--gpus", type=int, default=0, help="of each node")
    parser.add_argument("what", choices=["up", "down"], help="up stays until Ctrl-C; down ends one that was left")
    options = parser.parse_args()
    if options.what == "down":
        return clean(Instance(options.instance))
    images = [name for name in options.images.split(",") if name]
    cluster = Cluster(options.instance, nodes=options.nodes, images=images, gpus=options.gpus)
    try:
        with cluster:
            print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        print("down")


if __name__ == "__main__":
    main()
