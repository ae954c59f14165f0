"""`kubectl rlhf top`: every worker as the job's control sees it."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from rlhfspec.plugin.output import shown
from rlhfspec.plugin.pods import duration, node_of, worker_of

Json = dict[str, Any]


def table_of(seen: Json, pods: list[Json]) -> Table:
    """Generators first: they are what differs."""
    nodes = {worker_of(pod): node_of(pod) for pod in pods}
    table = Table(caption=None if seen["workers"] else "no worker has said anything yet")
    for title in ("worker", "node", "does", "strategy"):
        table.add_column(title)
    for title in ("for", "tokens/s", "runs", "queue", "accepted", "samples"):
        table.add_column(title, justify="right")
    for worker in sorted(seen["workers"], key=lambda each: (each["load"] is None, each["name"])):
        load = worker["load"]
        row = [worker["name"], nodes.get(worker["name"], ""), _does(worker), ""]
        row += [duration(worker["since_seconds"]), "", "", "", "", ""]
        if load is not None:
            accepted = load.get("accepted_per_verification")
            row[3] = load["strategy"]
            row[5:] = [
                f"{load['tokens_per_second']:.0f}", str(load["num_running"]), str(load["num_waiting"]),
                "" if accepted is None else f"{accepted:.2f}", str(load["num_samples"]),
            ]  # fmt: skip
        table.add_row(*(Text(shown(cell)) for cell in row))  # never as markup
    return table


def _does(worker: Json) -> str:
    """
    >>> _does({"doing": "waiting", "what": "a demand"}), _does({"doing": "working", "what": "loading weights"})
    ('waits for a demand', 'loading weights')
    >>> _does({"doing": "silent", "what": "no heartbeat from it"})
    'silent'
    """
    doing, what = str(worker["doing"]), str(worker["what"])
    if doing == "silent":
        return "silent"
    if doing == "working" and what:
        return what
    return f"waits for {what}" if doing == "waiting" and what else f"{doing} {what}".strip()
