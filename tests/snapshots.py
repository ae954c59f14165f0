"""Snapshots of a generator's state."""

from rlhfspec.messages.records import Heartbeat, Load, WorkerInfo

LOAD = Load(
    id="1", job="sums", generator="generator-0", step=3, num_running=2, num_waiting=1, num_finished=7, num_tokens=99,
    tokens_per_second=123.4, accepted_per_verification=None, strategy="suffix", sample_ids=("sums/3/0/0", "sums/3/0/1"),
)  # fmt: skip
WAITS = Heartbeat(
    id="b", job="sums", stage="generator", worker=0, doing="waiting", what="prompts", since_seconds=1.5,
    overdue_seconds=float("-inf"), busy_seconds=7.0,
)  # fmt: skip
READY = WorkerInfo(
    id="w", job="sums", stage="generator", worker=0, host="node", pid=7, grpc_address="", http_address=""
)
GENERATOR = (READY, WAITS, LOAD)
