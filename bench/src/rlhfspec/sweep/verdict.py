"""Verdict on one model: the engine in all its modes against an oracle that shares no code with it.

The oracle (`rlhfspec.engine.oracle`) runs plain Hugging Face with eager attention, the whole prefix for each token. A
model is *right* when

- tokens and log-probs are the oracle's, to 1e-5; where float32 rounding is larger, at most twice as far from float64 as
  copies of plain Hugging Face with weights moved within their last bit;
- bits are the same one by one and together, in chunks, with one thread and two, with draft trees, with the suffix
  drafter, preempted, and moved between engines; in float32 and bfloat16;
- the trainer's log-probs are the same to 1e-5, the exact trainer's to the bit, with gradients like torch's; also with
  LoRA;
- answers that share a prompt match those with copies: log-probs to 1e-6 of the largest, the exact trainer's to the bit,
  gradients to 1e-5 (in float64 where float32 rounding is larger);
- the trainer in bfloat16 is as near to float32 as Hugging Face in bfloat16, at every position of a long row.

A model is *refused* when loading gives a reason, else *wrong*. Large models are judged by two samples and a short row,
without gradients, LoRA, drafting model and moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rlhfspec import job
from rlhfspec.engine import oracle
from rlhfspec.engine.base import Request
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.params import SamplingParams
from rlhfspec.errors import InvalidRequest, UnsupportedModel, first_line
from rlhfspec.huggingface.fused.casting import Precision, cast
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.huggingface.structure.attention import use_eager_experts
from rlhfspec.huggingface.structure.causal_lm import anatomy_of, within_positions
from rlhfspec.kernels.attention_splits import UNIT
from rlhfspec.messages.records.models import ModelReport
from rlhfspec.sweep.by_position import MOST_TIMES_WORSE, Band, judge_positions
from rlhfspec.sweep.ways import Samples, Wrong, check_same, moving, one_by_one, preempt, together
from rlhfspec.tiny import perturbed
from rlhfspec.training.modeling.exact import ExactForward
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.lora import add_lora, merged_state
from rlhfspec.training.modeling.packed import PackedRow, pack_sequences
from rlhfspec.training.scoring.log_probs import log_probs_reference

log = logging.getLogger(__name__)
Kind = Literal["right", "refused", "wrong", "not made"]
PROMPT_LENGTHS = (5, 37, 2, 70)  # shorter and longer than blocks of keys, attention splits and most windows
TOLERANCE = 1e-5  # of log-probs and their margins
GRADIENT_TOLERANCE = 1e-4
SHARED_TOLERANCE, SHARED_GRADIENT_TOLERANCE = 1e-6, 1e-5  # of shared prompts, in parts of the largest number
_TREE = DraftPlan(drafter="model", depth=4, width=2, branch=2)
_RANK = 2
_BESIDE = 1e-3  # standard deviations of a weight matrix
_COPIES = 4  # of a model, to measure its float32 rounding
_ROWS = 3  # tried in bfloat16


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    detail: str = ""  # why it is not right
    difference: float = 0.0  # the largest, of log-probs to the oracle's
    report: ModelReport | None = None  # what loading found, where it is right
    not_exact: str = ""  # why it cannot be trained exactly on-policy
    in_bfloat16: Band | None = None  # the trainer's worst band beside Hugging Face
    not_in_bfloat16: str = ""  # why it cannot be trained in bfloat16

    @property
    def limits(self) -> list[str]:
        parts = ("no exactOnPolicy", self.not_exact), ("no model.dtype bfloat16", self.not_in_bfloat16)
        return [f"{what}: {why}" for what, why in parts if why]


def judge(make: Callable[[], Any], *, thorough: bool = True, max_context: int = 128) -> Verdict:
    """Judge a model; `make` returns a new one on each call.

    A `thorough` verdict keeps about ten copies in memory. The proof at load checks positions up to `max_context`.
    """
    try:
        return _Judge(make, max_context).verdict() if thorough else _QuickJudge(make, max_context).verdict()
    except (UnsupportedModel, InvalidRequest) as error:
        return Verdict("refused", f"{error.value}: {error.problem}")
    except Wrong as error:
        return Verdict("wrong", str(error))
    except Exception as error:  # a crash is wrong too
        log.debug("while judging", exc_info=True)
        return Verdict("wrong", f"{type(error).__name__}: {first_line(error)}")


class _Judge:
    num_samples = len(PROMPT_LENGTHS)
    max_tokens = 16
    long_row = 1024  # tokens, where the model has as many positions

    def __init__(self, make: Callable[[], Any], max_context: int) -> None:
        self.make = make
        self.max_context = max_context
        self.requests: list[Request] = []

    def verdict(self) -> Verdict:
        plain = self.engine()
        report = plain.reports["model"]
        vocab_size = plain.state.target.runner.vocab_size
        self.requests = list(self._requests(plain.state.target.runner.num_token_ids))
        alone = one_by_one(plain, self.requests)
        del plain
        difference = self._check_oracle(alone)
        rounded = self.check_ways(alone)
        self._check_trainer(alone)
        self._check_shared(alone)
        found: dict[str, Any] = {"difference": difference, "report": report}
        try:
            self.check_training(self._check_exact(alone, "float32"), alone)
            self._check_exact(rounded, "bfloat16")
        except UnsupportedModel as error:
            found["not_exact"] = f"{error.value}: {error.problem}"
        try:
            found["in_bfloat16"] = self._check_positions(vocab_size)
        except UnsupportedModel as error:
            found["not_in_bfloat16"] = f"{error.value}: {error.problem}"
        return Verdict("right", **found)

    def engine(self, *, draft: Any = None, **options: Any) -> Engine:
        usual: dict[str, Any] = {"max_sequences": 4, "profile": False, "num_threads": 1, "speculation": "off"}
        context = {"max_context": self.max_context, "kv_cache_tokens": self.max_context + 1024, "attention_split": UNIT}
        return make_engine(self.make(), EngineConfig(**(usual | context | options)), draft=draft)

    def _requests(self, num_token_ids: int) -> Iterator[Request]:
        draw = np.random.default_rng(0)
        temperatures = (1.0, 0.7, 1.0, 0.0)
        max_tokens = min(self.max_tokens, self.max_context // 2)
        for index, (length, temperature) in enumerate(zip(PROMPT_LENGTHS, temperatures, strict=True)):
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
            length = min(length, self.max_context - max_tokens)
            prompt = tuple(draw.integers(0, num_token_ids, length).tolist())
            if index < self.num_samples:
                yield Request(id=f"r{index}", prompt_token_ids=prompt, params=params, seed=11 + index)

    # ---- the engine -------------------------------------------------------------------------------------------------

    def check_ways(self, alone: Samples) -> Samples:
        """Check that every way of running gives the bits of `alone`, and return samples generated in bfloat16."""
        draft = {"speculation": _TREE, "num_threads": 2}
        drafted = self.engine(draft=perturbed(self.make(), 0.1), prefill_chunk=11, **draft)
        check_same("together, with trees and two threads", alone, together(drafted, self.requests))
        suffix = self.engine(speculation="suffix")
        check_same("preempted, with the suffix drafter", alone, together(suffix, self.requests, every_step=preempt))
        check_same("moved from engine to engine", alone, moving(drafted, suffix, self.requests))
        rounded = one_by_one(self.engine(dtype="bfloat16"), self.requests)
        drafted = self.engine(draft=perturbed(self.make(), 0.1), dtype="bfloat16", **draft)
        check_same("together, with trees, in bfloat16", rounded, together(drafted, self.requests))
        return rounded

    @torch.inference_mode()
    def _check_oracle(self, samples: Samples) -> float:
        """Check the samples against the oracle, and return the largest log-prob difference."""
        for sample in samples.values():
            if sample.error:
                raise Wrong(sample.error)
        model, log_probs = _plain(self.make()), list[float]()
        for request in self.requests:
            ours = list(samples[request.id].token_ids)
            prompt = list(request.prompt_token_ids)
            theirs = oracle.decode(model, prompt, request.params, request.seed, forced=ours)
            log_probs += theirs.log_probs
            for our_token, token, margin in zip(ours, theirs.token_ids, theirs.margins, strict=True):
                if our_token != token and margin > TOLERANCE:
                    raise Wrong(f"another token than the oracle's, which leads by {margin:.1e}")
        wanted, found = torch.tensor(log_probs, dtype=torch.float64), _generated(samples)
        difference = float((found.double() - wanted).abs().max())
        if difference > TOLERANCE and not self._is_rounding(samples, found):
            raise Wrong(f"log-probs differ from the oracle's by {difference:.1e}")
        return difference

    @torch.inference_mode()
    def _is_rounding(self, samples: Samples, ours: torch.Tensor) -> bool:
        """Return whether `ours` is at most twice as far from float64 log-probs as Hugging Face in float32.

        One float32 run may be lucky, so copies with weights moved within their last bit are included.
        """
        truth = _whole(_plain(self.make().double()), samples)
        copies = [self.make(), *(_moved_within_the_last_bit(self.make(), seed) for seed in range(_COPIES))]
        noise = max(float((_whole(_plain(copy), samples) - truth).abs().max()) for copy in copies)
        return float((ours.double() - truth).abs().max()) <= 2 * noise

    # ---- the trainer ------------------------------------------------------------------------------------------------

    def _prepared(self, *, seed: int = 0) -> Any:
        """Return a copy prepared for the trainer, slightly perturbed unless `seed` is 0."""
        model = perturbed(self.make(), _BESIDE, seed=seed) if seed else self.make()
        return prepared(model, max_context=self.max_context)

    @torch.no_grad()
    def _check_trainer(self, samples: Samples) -> None:
        found = TorchForward(self._prepared(), 1.0)(_packed(samples)).log_probs
        difference = float((found - _generated(samples)).abs().max())
        if difference > TOLERANCE and not self._is_rounding(samples, found):
            raise Wrong(f"the trainer's log-probs differ by {difference:.1e}")

    def _check_shared(self, samples: Samples) -> None:
        """Compare responses that share a prompt with responses that each have a copy."""
        problem = self._shared_problem(samples, torch.float32)
        if problem and (problem := self._shared_problem(samples, torch.float64)):
            raise Wrong(f"answers that share their prompt have other {problem}")

    @torch.no_grad()
    def _shared_problem(self, samples: Samples, dtype: torch.dtype) -> str:
        forward = self._in(dtype)
        copies, shared = (forward(batch).log_probs for batch in _siblings(samples))
        apart = float((shared - copies).abs().max() / copies.abs().max())
        return f"log-probs, by {apart:.1e} of the largest" if not apart <= SHARED_TOLERANCE else ""

    def _in(self, dtype: torch.dtype, *, seed: int = 0) -> TorchForward:
        """Return the trainer's forward in another dtype."""
        model = self._prepared(seed=seed)
        cast(model, Precision(dtype))
        use_eager_experts(model)  # grouped products know no float64
        return TorchForward(model, 1.0)

    def _check_positions(self, vocab_size: int) -> Band:
        """Return the band with the worst bfloat16 errors of the first row that passes; one row may fail by bad luck."""
        num_tokens = self._longest()
        for seed in range(_ROWS):
            bands = judge_positions(self.make, num_tokens=num_tokens, vocab_size=vocab_size, seed=seed)
            worst = max(bands, key=lambda band: band.ratio)
            if worst.ratio <= MOST_TIMES_WORSE:
                return worst
        raise Wrong(f"the trainer's log-probs in bfloat16 are {worst}")

    def _longest(self) -> int:
        """Return the length of the long test row, at most `max_context` if RoPE angles change with length."""
        model = self.make()
        longest = within_positions(model, self.long_row)
        try:
            examine(model, name="model", max_context=longest)
        except UnsupportedModel:
            return min(longest, self.max_context)
        return longest

    def _check_exact(self, samples: Samples, dtype: str) -> ExactForward:
        return self._same_exactly(self._exact(self._prepared(), dtype), samples, f"in {dtype}")

    def _exact(self, model: Any, dtype: str = "float32") -> ExactForward:
        return ExactForward(model, 1.0, max_context=self.max_context, dtype=dtype, attention_split=UNIT)

    def _same_exactly(self, exact: ExactForward, samples: Samples, how: str) -> ExactForward:
        if not torch.equal(exact(_packed(samples)).untempered, _generated(samples)):
            raise Wrong(f"the exact trainer gives other bits {how}")
        with torch.no_grad():
            copies, shared = (exact(batch).untempered for batch in _siblings(samples))
        if not torch.equal(copies, shared):
            raise Wrong(f"the exact trainer gives other bits {how} to answers that share their prompt")
        return exact

    def check_training(self, exact: ExactForward, samples: Samples) -> None:
        self._check_gradients(exact, _packed(samples))
        self._check_shared_gradients(samples)
        self._check_lora()

    def _check_gradients(self, exact: ExactForward, batch: PackedRow) -> None:
        """Compare gradients with torch's, and if they differ with perturbed models, as rounding matters at kinks."""
        problem = self._gradient_problem(exact, batch, seed=0)
        for seed in (1, 2):
            if problem:
                problem = self._gradient_problem(self._exact(self._prepared(seed=seed)), batch, seed=seed)
        if problem:
            raise Wrong(problem)

    def _check_shared_gradients(self, samples: Samples) -> None:
        problem = self._shared_gradient_problem(samples, torch.float32)
        if problem and (problem := self._shared_gradient_problem(samples, torch.float64)):
            raise Wrong(problem)

    def _shared_gradient_problem(self, samples: Samples, dtype: torch.dtype) -> str:
        """Describe the first gradient that sharing prompts changes, relative to the largest; some are only rounding."""
        copies, shared = (_gradients(self._in(dtype), batch) for batch in _siblings(samples))
        largest = max(float(gradient.abs().max()) for gradient in copies.values())
        for name, gradient in copies.items():
            apart = float((shared[name] - gradient).abs().max()) / largest
            if not apart <= SHARED_GRADIENT_TOLERANCE:
                return f"answers that share their prompt have another gradient of {name}, by {apart:.1e} of the largest"
        return ""

    def _gradient_problem(self, exact: ExactForward, batch: PackedRow, *, seed: int) -> str:
        """Return the first difference from torch's gradients; float64 decides on differences over 1e-4."""

        def torchs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
            return _gradients(self._in(dtype, seed=seed), batch)

        ours, theirs = _gradients(exact, batch), torchs(torch.float32)
        if ours.keys() != theirs.keys():
            return f"the exact trainer has gradients of others: {', '.join(sorted(ours.keys() ^ theirs.keys()))}"
        differences = {name: float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours}
        suspects = [name for name, difference in differences.items() if not difference <= GRADIENT_TOLERANCE]
        truth = torchs(torch.float64) if suspects else {}
        for name in suspects:
            if not (ours[name] - truth[name]).abs().max() <= 10 * (theirs[name] - truth[name]).abs().max():
                return f"the exact trainer's gradient of {name} differs by {differences[name]:.1e} of the largest"
        return ""

    def _check_lora(self) -> None:
        """Compare the engine with merged LoRA weights to the exact trainer with separate ones."""
        policy = self._prepared()
        targets = _update_targets(policy)
        if not targets:
            return
        lora = job.Lora(rank=_RANK, targetModules=targets)
        add_lora(policy, lora, seed=1)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:  # zero at first
                    parameter.copy_(0.05 * torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
        engine = self.engine()
        engine.load_weights(merged_state(policy.state_dict(), lora.alpha / _RANK), version=1)
        self._same_exactly(self._exact(policy), one_by_one(engine, self.requests), "under a low-rank update")


class _QuickJudge(_Judge):
    """Judge of large models, with fewer checks and one engine at a time."""

    num_samples = 2
    max_tokens = 8
    long_row = 512

    def check_ways(self, alone: Samples) -> Samples:
        engine = self.engine(speculation="suffix", num_threads=2, prefill_chunk=11)
        check_same("together, with the suffix drafter and two threads", alone, together(engine, self.requests))
        del engine
        engine = self.engine(dtype="bfloat16")
        rounded = one_by_one(engine, self.requests)
        engine.set_speculation("suffix")
        check_same("together, with the suffix drafter, in bfloat16", rounded, together(engine, self.requests))
        return rounded

    def check_training(self, exact: ExactForward, samples: Samples) -> None:
        pass


def _plain(model: Any) -> Any:
    """Return the model with Hugging Face's own code and eager attention."""
    model.set_attn_implementation("eager")
    use_eager_experts(model)
    return model


@torch.no_grad()
def _moved_within_the_last_bit(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + 2**-24 * torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1))
    return model


def _whole(model: Any, samples: Samples) -> torch.Tensor:
    """Return the log-probs of all samples' tokens as one float64 tensor, by one forward per sample."""
    each = (log_probs_reference(model, s.prompt_token_ids, s.token_ids, 1.0) for s in samples.values())
    return torch.tensor([number for log_probs in each for number in log_probs], dtype=torch.float64)


def _packed(samples: Samples) -> PackedRow:
    return pack_sequences([s.prompt_token_ids for s in samples.values()], [s.token_ids for s in samples.values()])


def _siblings(samples: Samples) -> tuple[PackedRow, PackedRow]:
    """Return two packed rows in which every prompt has responses of several lengths: copied for each, and shared."""
    answers = [list(sample.token_ids) for sample in samples.values()]
    answers = [answers[0], answers[-1][:1], answers[-1][::-1][: len(answers[-1]) // 2 + 1]]
    prompts = [sample.prompt_token_ids for sample in samples.values() for _ in answers]
    responses = answers * len(samples)
    return pack_sequences(prompts, responses), pack_sequences(prompts, responses, share_prompts=True)


def _generated(samples: Samples) -> torch.Tensor:
    return torch.tensor([number for sample in samples.values() for number in sample.log_probs])


def _gradients(forward: TorchForward, batch: PackedRow) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, len(batch.targets))
    (forward(batch).log_probs * weights).sum().backward()
    parameters = forward.model.named_parameters()
    return {name: parameter.grad.double() for name, parameter in parameters if parameter.grad is not None}


def _update_targets(policy: Any) -> list[str]:
    """Return names that only linear layers of the decoder have, for LoRA."""
    head = policy.get_output_embeddings()
    linear, other = set[str](), {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}  # of experts too
    for path, module in policy.named_modules():
        runs = path in anatomy_of(policy).called and type(module) is torch.nn.Linear and module is not head
        (linear if runs else other).add(path.rpartition(".")[2])
    return sorted(name for name in linear - other if not name.isdigit())
