"""Compare ways to send weights from one trainer to several receiver processes: `python bench/weights.py`.

`file` is a store on /dev/shm; `grpc` sends to each receiver; `tls` adds mutual TLS; `group` sends by gloo while the
version is put for gRPC. Ways take turns; figures are medians without two cold turns. `seconds` last from the record's
arrival until the last receiver has checked tensors; `whole` includes the put. `each` is the median receiver's rate,
`all` the total, `link` the rate leaving the trainer. A `peak` is a process's largest memory growth, also in cold turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhfspec.kernels.malloc import tune_malloc

WAYS = ("file", "grpc", "tls", "group")
NUM_TENSORS = 100
NUM_COLD = 2
KEEP = 1  # all ways are in memory at once: 4 GB for each of gRPC
HOST = "127.0.0.1"
STAGES = ("trainer", "generator")


def main() -> None:
    args = arguments()
    folder = Path(tempfile.mkdtemp(prefix="rlhfspec-bench-", dir="/dev/shm"))
    try:
        turns: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        most: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        with workers(args, folder) as by_way:
            for turn in range(NUM_COLD + args.turns):
                for way, (trainer, receivers) in by_way.items():
                    found = one_turn(trainer, receivers, version=turn + 1, num_bytes=args.megabytes * 10**6)
                    most[way].append({name: value for name, value in found.items() if "peak" in name})
                    if turn >= NUM_COLD:
                        turns[way].append(found)
    finally:
        shutil.rmtree(folder)
    medians = {
        way: {name: statistics.median(turn[name] for turn in found) for name in found[0]}
        for way, found in turns.items()
    }
    for way, found in most.items():
        medians[way] |= {name: max(turn[name] for turn in found) for name in found[0]}
    print(json.dumps({"megabytes": args.megabytes, "receivers": args.receivers, "turns": args.turns, "ways": medians}))
    print("\n" + table(medians))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["file", "grpc"])
    return parser.parse_args()


def table(medians: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(medians.values())))
    lines = [" | ".join(["way", *names]), " | ".join("---" for _ in range(len(names) + 1))]
    lines += [" | ".join([way, *(f"{found[name]:.2f}" for name in names)]) for way, found in medians.items()]
    return "\n".join(f"| {line} |" for line in lines)


def one_turn(trainer: Connection, receivers: list[Connection], *, version: int, num_bytes: int) -> dict[str, float]:
    gigabytes = num_bytes / 1e9
    for process in (trainer, *receivers):
        ask(process, "peak", True)
    put = ask(trainer, "put", version)
    before = ask(trainer, "used", None)
    began = time.perf_counter()
    for receiver in receivers:
        receiver.send(("get", put["record"]))
    got = [receiver.recv() for receiver in receivers]
    seconds = time.perf_counter() - began
    after = ask(trainer, "used", None)
    sent = (after["sent"] - before["sent"]) / 1e9
    return {
        "put, GB/s": gigabytes / put["seconds"],
        "put, CPU s/GB": put["cpu"] / gigabytes,
        "seconds": seconds,
        "whole, s": put["seconds"] + seconds,
        "each, GB/s": gigabytes / statistics.median(one["seconds"] for one in got),
        "all, GB/s": gigabytes * len(receivers) / seconds,
        "link, GB/s": sent / seconds,
        "link, GB": sent,
        "trainer, CPU s": after["cpu"] - before["cpu"],
        "receivers, CPU s/GB": sum(one["cpu"] for one in got) / gigabytes / len(receivers),
        "trainer's peak, MB": ask(trainer, "peak", False)["peak"] / 1e6,
        "a receiver's peak, MB": max(ask(receiver, "peak", False)["peak"] for receiver in receivers) / 1e6,
    }


def ask(worker: Connection, what: str, argument: Any) -> Any:
    worker.send((what, argument))
    return worker.recv()


@contextmanager
def workers(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, tuple[Connection, list[Connection]]]]:
    credentials = folder / "credentials"
    if "tls" in args.ways:
        from rlhfspec.messages.servers.credentials.certificates import create_credentials

        create_credentials(credentials, STAGES)
    context = multiprocessing.get_context("spawn")
    processes, found = [], {}
    for way in args.ways:
        trainer_address, ends = None, []
        for stage in ("trainer", *["generator"] * args.receivers):
            ours, theirs = context.Pipe()
            settings = {
                "stage": stage,
                "way": way,
                "folder": folder,
                "trainer": trainer_address,
                "size": args.megabytes,
            }
            processes.append(context.Process(target=work, args=(theirs, settings)))
            processes[-1].start()
            trainer_address = trainer_address or ask(ours, "address", None)
            ends.append(ours)
        found[way] = (ends[0], ends[1:])
        if way == "group":
            ask(ends[0], "meet", args.receivers)
    try:
        yield found
    finally:
        for trainer, receivers in found.values():
            for end in (*receivers, trainer):
                end.send(("end", None))
        for process in processes:
            process.join()


def work(orders: Connection, settings: dict[str, Any]) -> None:
    """Run one process, which executes orders and replies with the costs of each."""
    tune_malloc()  # first, as processes of a run do
    import torch

    torch.set_num_threads(1)
    store, address, end = make_store(**settings)
    size = settings["size"] * 10**6 // 4 // NUM_TENSORS
    state = {f"{index:03}": torch.randn(size) for index in range(NUM_TENSORS)} if settings["stage"] == "trainer" else {}
    rss = 0
    while (order := orders.recv())[0] != "end":
        began, cpu_began = time.perf_counter(), time.process_time()
        reply: dict[str, Any] = {}
        if order[0] == "put":
            for tensor in state.values():
                tensor[0] += 1.0
            reply["record"] = store.put("bench", "policy", order[1], state)
        elif order[0] == "get":
            assert len(store.get(order[1])) == NUM_TENSORS
        elif order[0] == "meet":
            store.meet(order[1])
        elif order[0] == "peak":
            reply["peak"] = peak_bytes(begin=order[1], before=rss)
            rss = reply["peak"] if order[1] else rss
        elif order[0] == "used":
            reply |= {"sent": sum(getattr(store, "sent", {}).values())}
        cpu = time.process_time() if order[0] == "used" else time.process_time() - cpu_began
        orders.send(reply | {"seconds": time.perf_counter() - began, "cpu": cpu} if order[0] != "address" else address)
    end()


def peak_bytes(*, begin: bool, before: int) -> int:
    """Return the resident bytes now (with `begin`), or how far their peak since then exceeds `before`."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS" if begin else "VmHWM"].split()[0]) * 1024 - (0 if begin else before)


class ByGroup:
    """Weight store of a run that sends versions to the group while they are stored."""

    def __init__(self, store: Any, trainer: str | None, server: Any, address: str) -> None:
        from rlhfspec.training.weights.group.messages import Wish
        from rlhfspec.training.weights.group.receiver import GroupReceiver
        from rlhfspec.training.weights.group.sender import GroupSender
        from rlhfspec.training.weights.group.ways import Ways

        self._store = store
        if trainer is None:
            self._sender = GroupSender("bench", host=HOST)
            self._sender.add_to(server)
        else:
            self._receiver = GroupReceiver(
                Wish(wants=True), Ways("group"), address=address, trainer_address=lambda: trainer
            )

    def meet(self, num_generators: int) -> None:
        while len(self._sender.members) < num_generators:
            time.sleep(0.1)

    def put(self, job: str, role: Any, version: int, state: Any) -> Any:
        sending = self._sender.begin(role, version, state)
        record = self._store.put(job, role, version, state)
        problem = sending.end(record.digest)
        assert not problem, problem
        return record

    def get(self, record: Any) -> Any:
        tensors = self._receiver.take(record)
        assert tensors is not None
        return tensors


def make_store(*, stage: str, way: str, folder: Path, trainer: str | None, size: int) -> Any:
    from rlhfspec.training.weights import FileWeightStore

    if way == "file":
        return FileWeightStore(folder / "weights", keep=KEEP), "-", lambda: None
    import grpc

    from rlhfspec.training.weights.grpc import GrpcWeightStore, channel_credentials

    server = grpc.server(ThreadPoolExecutor(8))
    files = folder / "credentials"
    if way == "tls":
        authority, key, certificate = (
            (files / name).read_bytes() for name in ("ca.pem", f"{stage}.key", f"{stage}.pem")
        )
        mutual = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
        port = server.add_secure_port(f"{HOST}:0", mutual)
    else:
        port = server.add_insecure_port(f"{HOST}:0")
    store: Any = GrpcWeightStore(
        keep=KEEP,
        trainer_address=None if stage == "trainer" else lambda: trainer,
        credentials=channel_credentials(files, stage) if way == "tls" else None,
    )
    store.add_to(server)
    if way == "group":
        store = ByGroup(store, None if stage == "trainer" else trainer, server, f"{HOST}:{port}")
        server.start()
        return store, f"{HOST}:{port}", lambda: server.stop(None).wait()
    server.start()
    return store, f"{HOST}:{port}", lambda: (store.close(), server.stop(None).wait())


if __name__ == "__main__":
    main()
