"""Proof at load that the engine runs the same model as Hugging Face, and that a row's bits do not depend on others.

Each probe's logits must match Hugging Face's. In one batch with all others (prompt chunks, single tokens, tree
branches, NaN in unused memory) no bit may change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhfspec.common.arrays import IntArray
from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.fused.fuse import FusedModel, guard_paths, guard_rows
from rlhfspec.huggingface.proof.kept import Proved
from rlhfspec.huggingface.proof.probes import Probe, random_past
from rlhfspec.huggingface.proof.reference import ExpertChoices, ProbeResult, Reference, compare, same_bits
from rlhfspec.huggingface.structure.attention import fit_cache
from rlhfspec.huggingface.structure.causal_lm import Anatomy, CausalLM
from rlhfspec.huggingface.structure.trace import refusing
from rlhfspec.kernels.decoder import NativeDecoder
from rlhfspec.kernels.tree_attention import AttentionMeta
from rlhfspec.kernels.tree_attention_twin import write_kv_reference
from rlhfspec.messages.records.models import ModelReport

log = logging.getLogger(__name__)
_REPORT_ATTRIBUTE = "rlhfspec_report"
_NATIVE = "native"
OWN_BITS, BITS_BY_COMPANY = "every row's own", "may depend on the rows beside it"


class Runnable(Protocol):
    kv: Tensor  # [blocks, layers, 2, block size, heads, dim]
    parts: CausalLM
    fused: FusedModel
    native: NativeDecoder | None

    def forward(self, tokens: IntArray, positions: IntArray, meta: AttentionMeta, logit_rows: IntArray) -> Tensor: ...

    def native_decoder(self) -> NativeDecoder | None: ...


def keep_report(model: Any, report: ModelReport) -> None:
    object.__setattr__(model, _REPORT_ATTRIBUTE, report)


def report_of(model: Any) -> ModelReport:
    return getattr(model, _REPORT_ATTRIBUTE)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class RunnerProof:
    runner: Runnable
    anatomy: Anatomy
    reference: Reference
    is_row_invariant: bool
    must_be: bool  # row invariance is required; else the report says that it is missing
    tolerance: float  # of the logits, relative to the largest
    attention_split: int
    dtype: str  # for the report
    prefill: str  # for the report: runs a prompt's chunks


def prove(proof: RunnerProof) -> Proved:
    """Run the proof; raise UnsupportedModel with the property that fails."""
    runner, reference = proof.runner, proof.reference
    name, kind = reference.name, reference.kind
    check = Check(runner, proof.anatomy, reference.probes)
    with refusing(name, kind, "fails on the engine's kernels"), ExitStack() as ending:
        ending.callback(check.clean)
        guarded: tuple[str, ...] = ()
        if proof.is_row_invariant and runner.kv.is_cpu:
            fused = runner.fused
            guarded = guard_rows(fused.model, fused.guard, runner.parts, check.a_forward(), name=name)
        alone, together = check.alone(), check.together()
        difference = reference.check(alone, proof.tolerance, whose="the engine's")
        is_invariant = proof.is_row_invariant and same_bits(alone, together)
        if proof.is_row_invariant and proof.must_be and not is_invariant:
            raise UnsupportedModel(name, kind, "a row's bits depend on the rows beside it")
        if not is_invariant and compare(together, alone, reference.probes)[0] > proof.tolerance:
            raise UnsupportedModel(name, kind, "a row's logits depend on the rows beside it")
        runner.native = runner.native_decoder()
        if runner.native is not None and not same_bits(check.together(), alone):
            log.warning("%s: the one-call decoder gives other bits than the layers of %s: using the layers", name, kind)
            runner.native = None
    report = ModelReport(
        model=kind,
        path="layers" if runner.native is None else _NATIVE,
        dtype=proof.dtype,
        attentions=proof.anatomy.kinds_of_attention,
        guarded=tuple(dict.fromkeys(type(runner.fused.model.get_submodule(path)).__name__ for path in guarded)),
        probes=tuple(str(probe) for probe in reference.probes),
        difference=difference,
        noise=reference.noise,
        bits=OWN_BITS if is_invariant else BITS_BY_COMPANY,
        attention_split=proof.attention_split,
        prefill=proof.prefill,
        seconds=0.0,
    )
    return Proved(report, guarded)


def adopt(runner: Runnable, anatomy: Anatomy, probes: Sequence[Probe], verdict: Proved) -> None:
    """Put the runner into the state that its proof would leave, given an earlier proof's result `verdict`."""
    guard_paths(runner.fused.model, runner.fused.guard, runner.parts, verdict.guarded)
    check = Check(runner, anatomy, probes)
    check.a_forward()()  # the first forward makes position tables
    check.clean()
    if verdict.report.path == _NATIVE:
        runner.native = runner.native_decoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeToken:
    token: int
    position: int
    slot: int
    probe: int  # row of the slot table
    context: int  # visible slots of the table
    extra: tuple[int, ...] = ()  # further visible slots: the branch that it ends
    wanted: int | None = None  # index in its probe, where its logits are compared


@dataclass(frozen=True, slots=True)
class ProbePlace:
    """Cache slots of a probe: one per position, plus those of dead-end branches."""

    probe: Probe
    index: int
    first: int

    @property
    def num_slots(self) -> int:
        return self.probe.length + len(self.probe.tokens)

    @property
    def half(self) -> int:
        return len(self.probe.tokens) // 2

    def alone(self) -> list[ProbeToken]:
        return [self._row(place) for place in range(len(self.probe.tokens))]

    def beginning(self) -> list[ProbeToken]:
        return [self._row(place) for place in range(self.half)]

    def ending(self, vocab_size: int, num_slots: int) -> list[ProbeToken]:
        """Return the second half's rows: a decoded token, then a branch with dead ends beside it while slots last."""
        rows, root = [self._row(self.half)], self.probe.past + self.half + 1
        branch: tuple[int, ...] = ()
        for place in range(self.half + 1, len(self.probe.tokens)):
            decoy = self.first + self.probe.length + place
            own = self.first + self.probe.past + place
            position = self.probe.past + place
            token = self.probe.tokens[place]
            common: dict[str, Any] = {"position": position, "probe": self.index, "context": root}
            if decoy < num_slots:
                rows.append(ProbeToken(token=(token + 1) % vocab_size, slot=decoy, extra=(*branch, decoy), **common))
            branch = (*branch, own)
            rows.append(ProbeToken(token=token, slot=own, extra=branch, wanted=place, **common))
        return rows

    def _row(self, place: int) -> ProbeToken:
        position = self.probe.past + place
        return ProbeToken(
            token=self.probe.tokens[place], position=position, slot=self.first + position, probe=self.index,
            context=position + 1, wanted=place,
        )  # fmt: skip


class Check:
    def __init__(self, runner: Runnable, anatomy: Anatomy, probes: Sequence[Probe]) -> None:
        self.runner = runner
        self.anatomy = anatomy
        self.probes = tuple(probes)
        self._num_slots = runner.kv.shape[0] * runner.kv.shape[3]
        self._num_used = 0  # blocks

    def alone(self) -> list[ProbeResult]:
        answers = []
        for probe in self.probes:
            [place] = self._places([probe])
            with ExpertChoices() as choices:
                [logits] = self._run([place], place.alone(), fresh=True)
            answers.append(ProbeResult(logits, choices.made))
        return answers

    def together(self) -> list[ProbeResult]:
        """Return results of the probes, batched in as few forwards as the cache allows."""
        answers: list[ProbeResult] = []
        for group in self._groups():
            places = self._places(group)
            begun = self._run(places, [row for place in places for row in place.beginning()], fresh=True)
            tokens = (place.ending(self.anatomy.vocab_size, self._num_slots) for place in places)
            ended = self._run(places, [row for rows in tokens for row in rows])
            answers.extend(ProbeResult(torch.cat(parts), []) for parts in zip(begun, ended, strict=True))
        return answers

    def a_forward(self) -> Callable[[], Tensor]:
        places = self._places(self._groups()[0])
        self._lay_out(places)
        return partial(
            self.runner.forward, *self._arguments(places, [row for place in places for row in place.alone()])
        )

    def _groups(self) -> list[list[Probe]]:
        groups: list[list[Probe]] = [[]]
        for probe in self.probes:
            if groups[-1] and not self._fits([*groups[-1], probe]):
                groups.append([])
            groups[-1].append(probe)
        return groups

    def _fits(self, probes: list[Probe]) -> bool:
        return sum(place.num_slots for place in self._places(probes)) <= self._num_slots

    def _places(self, probes: Sequence[Probe]) -> list[ProbePlace]:
        places: list[ProbePlace] = []
        first = 0
        for index, probe in enumerate(probes):
            places.append(ProbePlace(probe, index, first))
            first += places[-1].num_slots
        return places

    def _run(self, places: list[ProbePlace], rows: list[ProbeToken], *, fresh: bool = False) -> list[Tensor]:
        if fresh:
            self._lay_out(places)
        logits = self.runner.forward(*self._arguments(places, rows)).cpu()
        owners = [row.probe for row in rows if row.wanted is not None]
        return [logits[[place.index == owner for owner in owners]] for place in places]

    def _arguments(
        self, places: list[ProbePlace], rows: list[ProbeToken]
    ) -> tuple[IntArray, IntArray, AttentionMeta, IntArray]:
        tokens, positions = ([row.token for row in rows], [row.position for row in rows])
        wanted = [index for index, row in enumerate(rows) if row.wanted is not None]
        return _array(tokens), _array(positions), self._meta(places, rows), _array(wanted)

    def _meta(self, places: list[ProbePlace], rows: list[ProbeToken]) -> AttentionMeta:
        longest = max(place.probe.length for place in places)
        firsts = _array([place.first for place in places])
        extra = np.full((len(rows), max(len(row.extra) for row in rows)), -1, np.int32)
        for index, row in enumerate(rows):
            extra[index, : len(row.extra)] = row.extra
        return AttentionMeta(
            slots=_array([row.slot for row in rows]),
            table_rows=_array([row.probe for row in rows]),
            context_lens=_array([row.context for row in rows]),
            extra=extra,
            slot_table=(firsts[:, None] + np.arange(longest)).astype(np.int32),
        )

    def _lay_out(self, places: list[ProbePlace]) -> None:
        """Fill the probes' cache slots with NaN, then write their random past keys and values."""
        kv = self.runner.kv
        block_size, heads, dim = kv.shape[3], kv.shape[4], kv.shape[5]
        num_used = -(-sum(place.num_slots for place in places) // block_size)
        self._num_used = max(self._num_used, num_used)
        kv[:num_used] = float("nan")
        for place in (place for place in places if place.probe.past):
            slots = torch.arange(place.first, place.first + place.probe.past, device=kv.device)
            for spec in self.anatomy.attentions:
                past = (
                    fit_cache(states, heads, dim)[0].transpose(0, 1) for states in random_past(spec, place.probe.past)
                )
                keys, values = (states.to(kv.device) for states in past)  # [past, heads, dim]
                write_kv_reference(keys, values, kv, spec.index, slots)

    def clean(self) -> None:
        self.runner.kv[: self._num_used] = 0.0


def _array(numbers: list[int]) -> IntArray:
    return np.array(numbers, np.int32)
