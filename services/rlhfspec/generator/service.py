"""The generating stage: the engine between an inbox of prompts and a subject of samples."""

from __future__ import annotations

import time
from collections import deque

from rlhfspec.engine.base import Completion, EngineProtocol, Request
from rlhfspec.engine.params import SamplingParams
from rlhfspec.generator.history import Histories
from rlhfspec.generator.load import Experts, Meter
from rlhfspec.job import Generation, RLHFJob
from rlhfspec.records import Prompt, Sample, Weights
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Delivery, Inbox, StageBus
from rlhfspec.service.vitals import Vitals
from rlhfspec.weights import WeightStore, newest_kept

IDLE_SECONDS = 0.5
EARLY_SECONDS = 0.02  # prompts whose weights are not here yet are rare; others that could run may come after them
BURST_SECONDS = 0.05  # so long the engine steps between two looks at the inboxes; a finished sample ends it sooner


class GeneratorService(Service):
    """Consumes Prompt, Weights; produces Sample, Load; waits for prompts, and room in the KV cache; unblocked by
    prompts, trainer. A prompt is acknowledged once its sample is published, so a lost generator loses no sample."""

    def __init__(
        self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob, engine: EngineProtocol, weights: WeightStore
    ) -> None:
        super().__init__("generator", worker, vitals)
        self._bus = bus
        self._job = job
        self._engine = engine
        self._weights = weights
        self._deadline = job.spec.roles.generator.deadline_seconds
        self._params = sampling_params(job.spec.generation)
        self._early: deque[Delivery[Prompt]] = deque()  # their weights are not here yet
        self._running: dict[str, Delivery[Prompt]] = {}
        self._shares: dict[str, float] = {}  # of what runs: `_share_seconds` when it came
        self._share_seconds = 0.0  # of each piece of work, what fell to each sample that was there
        self._histories = Histories(keep=job.spec.algorithm.samples_per_prompt)
        self._meter = Meter(job.metadata.name, f"generator-{worker}", engine)

    async def run(self) -> None:
        async with await self._bus.subscribe(Prompt) as prompts, await self._bus.subscribe(Weights) as weights:
            while not self.stopping.is_set():
                await self._take_weights(weights)
                await self._take_prompts(prompts)
                if self._engine.has_work:
                    await self._generate()

    async def _take_weights(self, inbox: Inbox[Weights]) -> None:
        """Between two steps of the engine. What runs goes on under the new version, and says so token by token."""
        timeout = EARLY_SECONDS if self._early and not self._running else 0.0
        with self.vitals.waiting(f"weights newer than version {self._engine.weights_version}"):
            arrived = await self.unless_stopped(inbox.pull(max_records=1024, timeout_seconds=timeout))
        newer = [
            d.record for d in arrived if d.record.role == "policy" and d.record.version > self._engine.weights_version
        ]
        if newer:
            with self.vitals.working(f"loading weights version {newer[-1].version}", deadline_seconds=self._deadline):
                await self.in_thread(self._load, newer)

    def _load(self, records: list[Weights]) -> None:
        if (found := newest_kept(self._weights, records)) is not None:
            record, tensors = found
            self._engine.load_weights(tensors, version=record.version)

    async def _take_prompts(self, inbox: Inbox[Prompt]) -> None:
        idle = not (self._running or self._early)
        with self.vitals.waiting("prompts"):
            pulling = inbox.pull(max_records=1024, timeout_seconds=IDLE_SECONDS if idle else 0.0)
            arrived = await self.unless_stopped(pulling)
        self._early.extend(arrived)
        ready = [d for d in self._early if d.record.weights_version <= self._engine.weights_version]
        self._early = deque(d for d in self._early if d.record.weights_version > self._engine.weights_version)
        for delivery in ready:
            if delivery.record.id not in self._running:  # a redelivery of what already runs here
                self._submit(delivery.record)
                self._shares[delivery.record.id] = self._share_seconds
            self._running[delivery.record.id] = delivery

    def _submit(self, prompt: Prompt) -> None:
        request = Request(
            id=prompt.id,
            prompt_token_ids=prompt.token_ids,
            params=self._params,
            seed=prompt.seed,
            group=prompt.group_id,
            history=self._histories.of(prompt.token_ids),
        )
        self._engine.submit(request)
        self._meter.submitted(prompt.step)

    async def _generate(self) -> None:
        what = f"{len(self._running)} samples, the first {next(iter(self._running))}"
        with self.vitals.working(what, deadline_seconds=self._deadline) as worked:
            finished = await self.in_thread(self._burst)
        self._share_seconds += worked.seconds / len(self._running)
        if (load := self._meter.load()) is not None:
            await self._bus.publish(load)
        for completion in finished:
            delivery = self._running.pop(completion.id)
            seconds = self._share_seconds - self._shares.pop(completion.id)
            experts = self._meter.experts()
            sample = sample_of(delivery.record, completion, self._meter.name, seconds=seconds, experts=experts)
            await self._bus.publish(sample)
            await delivery.ack()
            self._histories.add(completion.prompt_token_ids, completion.token_ids)

    def _burst(self) -> list[Completion]:
        """Steps until something is finished, so that scoring begins with the first sample."""
        end = time.monotonic() + BURST_SECONDS
        finished: list[Completion] = []
        while self._engine.has_work and not finished and time.monotonic() < end:
            report = self._engine.step()
            self._meter.stepped(report)
            finished.extend(report.finished)
        return finished


def sampling_params(generation: Generation) -> SamplingParams:
    return SamplingParams(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        max_tokens=generation.max_tokens,
        stop=tuple(generation.stop),
        ignore_eos=generation.ignore_eos,
    )


def sample_of(
    prompt: Prompt, completion: Completion, generator: str, *, seconds: float = 0.0, experts: Experts = ()
) -> Sample:
    """Pure: the record of a finished response."""
    failed = completion.finish_reason not in ("stop", "length")
    return Sample(
        id=prompt.id,
        job=prompt.job,
        step=prompt.step,
        prompt=prompt.prompt,
        replica=prompt.replica,
        prompt_text=prompt.text,
        prompt_token_ids=prompt.token_ids,
        columns_json=prompt.columns_json,
        text=completion.text or "",
        token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        tempered_log_probs=completion.tempered_log_probs,
        weights_versions=completion.weights_versions,
        finish_reason="stop" if completion.finish_reason == "stop" else "error" if failed else "length",
        error=completion.error or completion.finish_reason if failed else "",
        num_verifications=completion.stats.num_verifications,
        num_drafted=completion.stats.num_drafted,
        num_accepted=completion.stats.num_accepted,
        strategies=completion.stats.strategies,
        experts=experts,
        seconds=seconds,
        generator=generator,
        purpose=prompt.purpose,
    )
