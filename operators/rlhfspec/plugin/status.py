"""`kubectl rlhf status`: a job as a tree of pods; `kubectl rlhf top`: its workers as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rlhfspec.plugin.output import shown
from rlhfspec.plugin.pods import age, condition_of, duration, name_of, node_of, role_of, state_of, worker_of

Json = dict[str, Any]
_PHASE_COLOURS = {
    "Running": "green", "Succeeded": "green", "Failed": "red", "Suspended": "yellow", "Suspending": "yellow",
}  # fmt: skip


def tree_of(job: Json, pods: list[Json]) -> Tree:
    status = job.get("status") or {}
    tree = Tree(_head(job, status))
    for line in _progress(job, status):
        tree.add(Text(shown(line)))
    healthy = condition_of(job, "Healthy")
    if healthy.get("status") == "False":
        tree.add(Text(shown(f"{healthy['reason']}: {healthy.get('message', '')}"), style="red"))
    for role in dict.fromkeys([*(status.get("roles") or {}), *map(role_of, pods)]):
        branch = tree.add(_role(role, (status.get("roles") or {}).get(role, {})))
        for pod in pods:
            if role_of(pod) == role:
                branch.add(_pod(pod, status))
    conditions = tree.add("conditions")
    for condition in status.get("conditions") or ():
        if condition["status"] == "True" or condition["type"] == "Healthy":  # conditions not yet true are no news
            conditions.add(_condition(condition))
    return tree


def _head(job: Json, status: Json) -> Text:
    phase = status.get("phase", "not processed by an operator yet")
    text = Text(name_of(job), style="bold")
    text.append(shown(f"  {phase}"), style=_PHASE_COLOURS.get(phase, "cyan"))
    if job["spec"].get("suspend"):
        text.append("  suspend: true", style="yellow")
    return text.append(f"  {age(job['metadata'].get('creationTimestamp'))} old", style="dim")


def _progress(job: Json, status: Json) -> list[str]:
    progress, run = status.get("progress") or {}, status.get("run") or {}
    lines = []
    if progress:
        numbers = {
            "reward": _number(progress.get("reward"), "{:.3f}"), "KL": _number(progress.get("kl"), "{:.4f}"),
            "tokens/s": _number(progress.get("tokensPerSecond"), "{:.0f}"),
            "accepted": _number(progress.get("acceptedPerVerification"), "{:.2f}"),
        }  # fmt: skip
        told = [f"{name} {number}" for name, number in numbers.items() if number]
        eta = progress.get("etaSeconds")
        told += [f"about {duration(eta)} left"] if eta else []
        lines.append(f"step {progress.get('shown', '?')}" + (f"  {', '.join(told)}" if told else ""))
    if run.get("number"):
        restarts = (status.get("restarts") or {}).get("total", 0)
        again = f", {restarts} restarts" if restarts else ""
        lines.append(f"run {run['number']} in {run.get('folder', '?')}{again}")
    if condition_of(job, "Serving").get("status") == "True" and (serving := status.get("serving")):
        secret = f"{serving['tokenSecret']} -n {job['metadata']['namespace']}"
        read = f"kubectl get secret {secret} -o go-template='{{{{.data.token | base64decode}}}}'"
        lines.append(f"serves {serving['url']}; token: {read}")
    return lines


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _role(role: str, counts: Json) -> Text:
    text = Text(shown(role), style="bold")
    if counts:
        ready, wanted = counts.get("ready", 0), counts.get("wanted", 0)
        text.append(f"  {ready}/{wanted} ready", style="green" if ready == wanted else "yellow")
    return text


def _pod(pod: Json, status: Json) -> Text:
    state = state_of(pod)
    text = Text(name_of(pod))
    text.append(shown(f"  {state.word}"), style="green" if state.is_well else "red")
    text.append(f"  {node_of(pod) or 'no node'}  {age(pod['metadata'].get('creationTimestamp'))}", style="dim")
    restarts = ((status.get("restarts") or {}).get("byWorker") or {}).get(worker_of(pod), 0)
    if restarts:
        text.append(f"  {restarts} restarts", style="yellow")
    return text.append(shown(f"  {state.detail}")) if state.detail else text


def _condition(condition: Json) -> Text:
    text = Text(shown(f"{condition['type']}={condition['status']}"))
    since = age(condition.get("lastTransitionTime"))
    return text.append(shown(f"  {condition.get('reason', '')}  {since}"), style="dim")


def table_of(seen: Json, pods: list[Json]) -> Table:
    nodes = {worker_of(pod): node_of(pod) for pod in pods}
    table = Table(caption=None if seen["workers"] else "no worker has reported yet")
    for title in ("worker", "node", "activity", "strategy"):
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
    """Return the activity of a worker in words.

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
