from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhfspec.job import RLHFJob
from rlhfspec.stage.context import Context, TrainerContext
from rlhfspec.worker.worker import host_told

if TYPE_CHECKING:
    from rlhfspec.runs.folder.run_folder import RunFolder
    from rlhfspec.trainer.keeping import KeptFolder
    from rlhfspec.trainer.service import TrainerService
    from rlhfspec.training.leading import Leader


def build(job: RLHFJob, context: Context) -> TrainerService:
    from rlhfspec.common.ranks.meeting import joined
    from rlhfspec.huggingface.devices import device_of, settled
    from rlhfspec.runs.folder.trackers import check_packages
    from rlhfspec.training.leading import Leader
    from rlhfspec.training.learning.learner import Learner
    from rlhfspec.training.weights.group.sender import SendingRanks
    from rlhfspec.training.weights.group.shares import Shares

    check_packages(job)
    context.say("loading the policy")
    with ExitStack() as leaving:
        device = device_of(job.spec)
        ranks = leaving.enter_context(joined(**_meeting(job), device=device))
        learner = Learner.from_spec(job.spec, ranks=ranks, device=device)
        leader = Leader(learner, ranks)
        leaving.callback(leader.close)
        if isinstance(context, TrainerContext) and context.group_sender is not None:
            from rlhfspec.worker.weight_group import SendingStore, kept_as

            send = partial(leader.send, Shares().send) if leader.num_sharing > 1 else None
            sending = SendingRanks(num_senders=leader.num_sharing, send=send, kept_as=kept_as(learner.policy))
            context = replace(context, weights=SendingStore(context.weights, context.group_sender, sending))
        service = _service(job, context, leader, learner.policy)
        if settled(job.spec, device).training.autocast == "bfloat16":
            report = service.models["trainer"]
            service.models = {"trainer": replace(report, dtype=f"{report.dtype}, computed in bfloat16")}
        service.leaving.push(leaving.pop_all())
        return service


def _service(job: RLHFJob, context: Context, leader: Leader, policy: Any) -> TrainerService:
    from rlhfspec.huggingface.proof.check import report_of
    from rlhfspec.runs.folder.run_folder import RunFolder
    from rlhfspec.trainer.recorder import RunRecorder
    from rlhfspec.trainer.service import TrainerService
    from rlhfspec.training.checkpoint import export_hf
    from rlhfspec.training.data import load_tokenizer

    folder = RunFolder(context.run.folder)
    kept = _kept(job, context, folder)
    export = partial(
        export_hf,
        folder.export,
        config=policy.config,
        tokenizer=load_tokenizer(job.spec.model),
        generation_config=policy.generation_config,
    )
    service = TrainerService(
        context.worker,
        context.vitals,
        context.bus,
        job=job,
        learner=leader,
        weights=context.weights,
        recorder=RunRecorder(
            job, folder, export=export, verify=leader.verify, say=context.say, mirror=context.run.mirror
        ),
    )
    service.models = {"trainer": report_of(policy)}
    if kept is not None:
        kept.watch(service)
    return service


def _kept(job: RLHFJob, context: Context, folder: RunFolder) -> KeptFolder | None:
    if context.run.folder_is_kept_by != "trainer":
        return None
    from rlhfspec.trainer.keeping import KeptFolder

    assert isinstance(context, TrainerContext), "it has a process of its own"
    kept = KeptFolder(job, folder, context.bus, context.run.mirror)
    context.at_end.enter_context(kept)
    return kept


def follow(job: RLHFJob) -> None:
    """Train as a rank other than 0, until rank 0 stops."""
    from rlhfspec.common.ranks.meeting import joined
    from rlhfspec.huggingface.devices import device_of
    from rlhfspec.training import leading
    from rlhfspec.training.learning.learner import Learner
    from rlhfspec.training.weights.group.shares import Shares

    device = device_of(job.spec)
    shares, host = Shares(), host_told(os.environ)

    def send(told: Any, weights: dict[str, Any], rank: int) -> list[str]:
        own = {"device": device} if told.place.backend == "nccl" else {}
        return shares.send(told, weights, rank, host=host, **own)

    with joined(**_meeting(job), device=device) as ranks:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 handles them
        leading.follow(Learner.from_spec(job.spec, ranks=ranks, device=device), ranks, send)


def _meeting(job: RLHFJob) -> dict[str, Any]:
    """Return arguments for joining the ranks. Rank 0 may be silent while other stages work on a step."""
    roles = job.spec.roles
    deadline = roles.trainer.deadline_seconds
    return {
        "timeout_seconds": deadline,
        "silence_seconds": deadline + roles.generator.deadline_seconds,
        "tensor_parallel": roles.trainer.tensor_parallel,
    }
