"""Commands of `kubectl rlhf`; errors are one line, with exit code 2 for invalid requests and 1 for others."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfspec.errors import InvalidRequest, RLHFSpecError

if TYPE_CHECKING:
    from rlhfspec.plugin.cluster import Cluster

app = typer.Typer(name="kubectl rlhf", help="Inspect and control RLHFJobs.", no_args_is_help=True, add_completion=False)
Job = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", show_default=False)]
Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Namespace.  [default: the context's]")]
Context = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig.  [default: the current context]")
]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", help="Kubeconfig file.  [default: $KUBECONFIG, or the one in ~/.kube]")
]
Role = Annotated[str | None, typer.Option("--role", help="Role to show, such as generator.  [default: all roles]")]


@app.command()
def status(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Name of the job.  [default: all jobs]", show_default=False)
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show a job as a tree: phase, progress, roles, pods with their nodes, conditions."""
    from rlhfspec.plugin.output import console, say
    from rlhfspec.plugin.status import tree_of

    with _cluster(namespace, context, kubeconfig) as cluster:
        jobs = [cluster.job(job)] if job else cluster.jobs()
        if not jobs:
            say(f"no jobs in namespace {cluster.namespace}")
        for each in jobs:
            console().print(tree_of(each, cluster.pods(each["metadata"]["name"])))


@app.command()
def logs(
    job: Job,
    role: Role = None,
    sample: Annotated[
        str | None, typer.Option("--sample", help="Show only lines about this sample, in any role.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the logs until the job ends or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=1, help="Number of last lines of each pod to show.  [default: all]")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the logs of all pods of a job, merged by time."""
    from rlhfspec.plugin.logs import followed, lines, trace_of
    from rlhfspec.plugin.output import console

    with _cluster(namespace, context, kubeconfig) as cluster:
        cluster.job(job)
        trace, no_trace = trace_of(cluster, job, sample) if sample and not follow else ([], "")
        said = (
            followed(cluster, job, role=role, sample=sample)
            if follow
            else lines(cluster, job, role=role, sample=sample, tail=tail, trace=trace)
        )
        terminal, is_silent = console(), True
        for line in said:
            terminal.print(line.as_text(), soft_wrap=True)
            is_silent = False
        if is_silent and sample:
            no_trace = f", and there is no trace: {no_trace}" if no_trace else ""
            raise InvalidRequest("--sample", sample, f"no log line mentions it{no_trace}")
        if is_silent:
            phase = (cluster.job(job).get("status") or {}).get("phase", "Pending")
            raise InvalidRequest("JOB", job, f"none of its pods has a log: the job is {phase}")


@app.command()
def why(job: Job, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Explain why a job is pending, stalled or failed: the reason and the evidence."""
    from rlhfspec.plugin.output import say
    from rlhfspec.plugin.why import explanation

    with _cluster(namespace, context, kubeconfig) as cluster:
        for line in explanation(cluster, cluster.job(job)):
            say(line)


@app.command()
def drain(
    job: Job,
    worker: Annotated[
        str | None, typer.Argument(metavar="WORKER", help="Worker to drain, such as generator-1.")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="Drain every pod of the job on this node.")] = None,
    timeout_seconds: Annotated[
        float, typer.Option("--timeout-seconds", min=1, help="Seconds to wait for the pods.")
    ] = 180.0,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Move a worker to another node: it hands over its sequences and exits, and the operator starts it again."""
    from rlhfspec.plugin.changes import drain as drain_pods, to_drain
    from rlhfspec.plugin.output import say

    with _cluster(namespace, context, kubeconfig) as cluster:
        for line in drain_pods(cluster, to_drain(cluster, job, worker, node), timeout_seconds=timeout_seconds):
            say(line)


@app.command()
def suspend(job: Job, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Suspend a job: write a checkpoint and delete its pods."""
    _suspend(job, True, namespace, context, kubeconfig)


@app.command()
def resume(job: Job, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Resume a suspended job from its checkpoint."""
    _suspend(job, False, namespace, context, kubeconfig)


@app.command()
def top(
    job: Job,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until Ctrl-C.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show what every worker does now; for generators also tokens/s, load and strategy."""
    from rlhfspec.plugin.output import console
    from rlhfspec.plugin.status import table_of

    with _cluster(namespace, context, kubeconfig) as cluster:
        while True:
            console().print(table_of(cluster.ask_control(job, "--json"), cluster.pods(job)))
            if not watch:
                return
            time.sleep(2.0)


@app.command()
def view(job: Job, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Show the live view of a run; Ctrl-C ends the view, not the job."""
    with _cluster(namespace, context, kubeconfig) as cluster:
        command = cluster.view_command(job)
        sys.stdout.flush()
        os.execv(command[0], command)


@app.command("get-run")
def get_run(
    job: Job,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Folder to write to.  [default: out/JOB]", show_default=False)
    ] = None,
    claim: Annotated[
        str | None, typer.Option("--claim", help="PersistentVolumeClaim with the run folder, if no pod is left.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Image with tar for the helper pod, if no pod is left.")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Copy the run folder to this machine: steps, samples, checkpoints, the exported policy."""
    from rlhfspec.plugin.output import say
    from rlhfspec.plugin.run_folder import fetch

    with _cluster(namespace, context, kubeconfig) as cluster:
        folder = folder or Path("out") / job
        num_files = fetch(cluster, job, folder, claim=claim, image=image)
        say(f"{num_files} files in {folder}")


def main() -> None:
    app(prog_name="kubectl rlhf")


def _suspend(job: str, is_on: bool, namespace: str | None, context: str | None, kubeconfig: str | None) -> None:
    from rlhfspec.plugin.changes import suspend as change
    from rlhfspec.plugin.output import say

    with _cluster(namespace, context, kubeconfig) as cluster:
        say(change(cluster, job, is_on=is_on))


@contextmanager
def _cluster(namespace: str | None, context: str | None, kubeconfig: str | None) -> Iterator[Cluster]:
    from rlhfspec.plugin.cluster import Cluster, Where
    from rlhfspec.plugin.output import say

    try:
        with Cluster(Where(namespace, context, kubeconfig)) as cluster:
            yield cluster
    except RLHFSpecError as error:
        say(str(error), is_error=True)
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


if __name__ == "__main__":
    main()
