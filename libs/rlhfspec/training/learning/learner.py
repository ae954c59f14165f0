"""The learner, which trains deterministically on a step's rollouts.

    targets = algorithms.prepare(rollouts)
    for each epoch, for each mini-batch in id order:
        for each micro-batch (packing): forward, loss, backward
        clip gradients, step the optimizer and the schedule

Old log-probs come from the trainer's forward before the first update. Policy and critic are trained in turn, or on
one rank each (`training.fuse`) with the same bits. Bits depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfspec import job
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest, NumericalError, StorageError
from rlhfspec.huggingface.devices import settled
from rlhfspec.huggingface.fused.widened import widen
from rlhfspec.huggingface.structure.causal_lm import CausalLM, within_positions
from rlhfspec.messages.loop import scoring_stages
from rlhfspec.training.learning.aggregation import token_indices
from rlhfspec.training.learning.algorithms import (
    Targets,
    TokenTerms,
    has_gradient,
    metrics_before_updates,
    needs_policy_log_probs,
    policy_terms,
    prepare,
    value_terms,
)
from rlhfspec.training.learning.memory import ActivationRoom
from rlhfspec.training.learning.network import Network, State
from rlhfspec.training.learning.packing import pack, pack_groups, split_evenly
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.learning.sharding import shard
from rlhfspec.training.learning.tally import Tally
from rlhfspec.training.modeling import lora, tensor_parallel
from rlhfspec.training.modeling.critic import Critic, load_critic
from rlhfspec.training.modeling.loading import load_policy
from rlhfspec.training.modeling.log_probs import PolicyForward, TorchForward
from rlhfspec.training.modeling.packed import PackedRow, pack_sequences

log = logging.getLogger("rlhfspec.training.learning")
_MODELS = ("policy", "critic")  # trained by ranks 0 and 1 where each has a rank of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnReport:
    version: int  # of the new weights
    metrics: dict[str, float]
    advantages: Tensor  # [T]
    log_probs: Tensor  # [T] the trainer's, before the step's first update
    untempered_log_probs: Tensor  # [T] likewise, at temperature 1
    has_run: Tensor  # [T] bool; log-probs of samples without a gradient are not computed and stand as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    samples: range
    micro_batches: list[list[int]]  # indices into the step; empty ones keep ranks in step


class Learner:
    def __init__(
        self,
        spec: job.Spec,
        policy: Any,
        critic: Critic | None = None,
        *,
        ranks: Ranks | None = None,
        num_threads: int | None = None,
        device: str = "cpu",
        stored: bool = False,
    ) -> None:
        """Prepare loaded models for training in place. A model that only other ranks train may be None."""
        self.version = 0
        self._spec = spec = settled(spec, device)
        self._num_threads = num_threads or torch.get_num_threads()
        self._device = torch.device(device)
        self._widens = stored and spec.model.dtype == "float32"  # bfloat16 weights become float32 on the device
        self._all = ranks or Ranks()  # of the whole trainer
        models, self._ranks = share_of(spec, self._all)
        self._policy = policy
        training = spec.training
        self._share_prompts = training.share_prompts and not self._lora_dropout
        if training.share_prompts and self._lora_dropout and self._all.rank == 0:
            log.info("samples do not share their prompt in training: model.lora.dropout is drawn for each sample")
        modules: dict[str, Any] = {"policy": policy, "critic": critic}
        trunks = []
        for model in models:
            trunk, field = (policy, "path") if model == "policy" else (modules["critic"].trunk, "critic")
            tensor_parallel.cut(trunk, self._ranks.tensor, field=f"spec.model.{field}")
            trunks.append(CausalLM(policy).trunk if model == "policy" else trunk)
        room = ActivationRoom(spec, trunks, self._device, self._computes_in, widens=self._widens)
        self._networks = {model: self._network(model, modules[model]) for model in models}
        room.settle((each for network in self._networks.values() for each in network.parameters), self._ranks)

    @classmethod
    def from_spec(
        cls, spec: job.Spec, *, ranks: Ranks | None = None, num_threads: int | None = None, device: str = "cpu"
    ) -> Learner:
        """Load this rank's models. On a GPU or several ranks, weights are widened to float32 layer by layer."""
        models, sharing = share_of(spec, ranks or Ranks())
        stored = device != "cpu" or sharing.num_ranks > 1
        how: dict[str, Any] = {"max_context": spec.max_context, "ranks": sharing, "stored": stored}
        policy = load_policy(spec.model, seed=spec.training.seed, **how) if "policy" in models else None
        critic = load_critic(spec.model, **how) if "critic" in models else None
        return cls(spec, policy, critic, ranks=ranks, num_threads=num_threads, device=device, stored=stored)

    def _network(self, model: str, module: Any) -> Network:
        training = self._spec.training
        self._unshared(module)
        if model == "policy":
            self._forward = self._policy_forward(module)
            return Network(module, training.optimizer, training, field="spec.training.optimizer", ranks=self._ranks)
        self._shard(module, module.trunk)
        field = "spec.training.criticOptimizer"
        return Network(module, training.critic_optimizer, training, field=field, ranks=self._ranks)

    def _unshared(self, module: Any) -> None:
        if self._ranks.sharing.num_ranks > 1:
            return
        module.to(self._device)
        if self._widens:
            widen(module.parameters())

    def _shard(self, module: Any, trunk: Any) -> None:
        shard(module, trunk, self._device, self._ranks, computes_in=self._computes_in, widens=self._widens)

    def _policy_forward(self, policy: Any) -> PolicyForward:
        spec = self._spec
        temperature = spec.generation.temperature
        if spec.training.exact_on_policy:
            if self._ranks.num_ranks > 1:
                problem = f"needs a single rank, not {self._ranks.num_ranks}"
                raise InvalidRequest("spec.training.exactOnPolicy", True, problem)
            from rlhfspec.training.modeling.exact import ExactForward, check_exact

            check_exact(spec)
            max_context = within_positions(policy, spec.max_context)
            return ExactForward(policy, temperature, max_context=max_context, dtype=spec.generation.dtype)
        forward = TorchForward(policy, temperature)
        self._shard(forward, forward.parts.trunk)
        return forward

    @property
    def policy(self) -> Any:
        """Return the policy, which may be None on a critic's rank."""
        return self._policy

    # -- a step ---------------------------------------------------------------------------------------------

    def learn(self, rollouts: Rollouts) -> LearnReport:
        """Train one step. A NumericalError leaves the weights of the last good update."""
        torch.set_num_threads(self._num_threads)  # torch keeps it per thread
        algorithm, epochs = self._spec.algorithm, self._spec.training.epochs
        tally = Tally(rollouts.num_tokens)
        if needs_policy_log_probs(algorithm):
            self._keep_old_log_probs(rollouts, self._mini_batches(rollouts, range(rollouts.num_samples)), tally)
        old = tally.log_probs if tally.is_complete else None
        max_tokens = self._spec.generation.max_tokens
        targets, metrics = prepare(algorithm, rollouts, policy_log_probs=old, max_tokens=max_tokens)
        trained = self._trained(targets)
        minis = self._mini_batches(rollouts, trained)
        if not tally.is_complete and (len(minis) * epochs > 1 or self._lora_dropout):
            self._keep_old_log_probs(rollouts, minis, tally)
        for mini in minis * epochs:
            of_mini = targets.mini_batch(algorithm, mini.samples, max_tokens=max_tokens)
            for model in self._networks:
                self._step(model, rollouts, of_mini, mini, tally)
        tally.share(self._all)
        metrics |= metrics_before_updates(algorithm, rollouts, tally.log_probs, tally.entropy, tally.has_run)
        num_terms = epochs * int(rollouts.lengths[list(trained)].sum())
        metrics |= tally.metrics(rollouts, self._all, num_terms=num_terms)
        metrics["skipped_fraction"] = 1 - len(trained) / rollouts.num_samples
        metrics["staleness_max"] = float(self.version - int(rollouts.weights_versions.min()))
        self.version += 1
        return LearnReport(
            version=self.version, metrics=metrics, advantages=targets.advantages, log_probs=tally.log_probs,
            untempered_log_probs=tally.untempered, has_run=tally.has_run,
        )  # fmt: skip

    def _trained(self, targets: Targets) -> Sequence[int]:
        """Return the samples to run: all for a critic, else those with a gradient, at least one."""
        if self._trains_critic:
            return range(len(targets.lengths))
        learning: list[int] = has_gradient(self._spec.algorithm, targets).nonzero().flatten().tolist()
        return learning or [0]

    def _mini_batches(self, rollouts: Rollouts, trained: Sequence[int]) -> list[MiniBatch]:
        """Return the step's mini-batches, with only the `trained` samples (ascending) packed."""
        minis = []
        for samples in split_evenly(rollouts.num_samples, self._spec.training.mini_batches):
            chosen = [sample for sample in trained if sample in samples]
            prompts = [rollouts.prompt_token_ids[sample] for sample in chosen]
            answers: list[int] = (rollouts.lengths[chosen] - 1).tolist()  # the last token is not run
            shares = self._ranks.mine(self._pack(prompts, answers))
            minis.append(MiniBatch(samples=samples, micro_batches=[[chosen[i] for i in micro] for micro in shares]))
        return minis

    def _pack(self, prompts: Sequence[tuple[int, ...]], answers: Sequence[int]) -> list[list[int]]:
        budget, ranks = self._spec.training.tokens_per_micro_batch, self._ranks.sharing.num_ranks
        if self._share_prompts:
            return pack_groups(prompts, answers, budget, multiple_of=ranks)
        lengths = [len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return pack(lengths, budget, multiple_of=ranks)

    @torch.no_grad()
    def _keep_old_log_probs(self, rollouts: Rollouts, minis: Sequence[MiniBatch], tally: Tally) -> None:
        for mini in minis if "policy" in self._networks else ():
            for micro in mini.micro_batches:
                with self._autocast():
                    out = self._forward(self._packed(rollouts, micro or [mini.samples[0]]))
                if micro:
                    _watch(tally, rollouts, micro, out.log_probs, "log-probs")  # other samples' targets depend on them
                    tally.keep(_tokens(rollouts, micro), out)
        tally.share(self._all)

    def _policy_terms(self, rollouts: Rollouts, micro: list[int], targets: Targets, tally: Tally) -> TokenTerms:
        algorithm = self._spec.algorithm
        with self._autocast(), self._dropout(micro[0]):
            out = self._forward(self._packed(rollouts, micro), entropy_gradient=algorithm.entropy_coefficient > 0)
        _watch(tally, rollouts, micro, out.log_probs, "log-probs")
        tokens = _tokens(rollouts, micro)
        if not tally.is_complete:
            tally.keep(tokens, out)
        return policy_terms(algorithm, out.log_probs, tally.log_probs[tokens].to(self._device), targets, out.entropy)

    def _critic_terms(self, rollouts: Rollouts, micro: list[int], targets: Targets, tally: Tally) -> TokenTerms:
        with self._autocast():
            values = self._networks["critic"].module(self._packed(rollouts, micro))
        _watch(tally, rollouts, micro, values, "values")
        return value_terms(self._spec.algorithm, values, targets)

    def _step(self, model: str, rollouts: Rollouts, targets: Targets, mini: MiniBatch, tally: Tally) -> None:
        """Accumulate the mini-batch's gradients and step the optimizer. Raise NumericalError if they are not finite."""
        network = self._networks[model]
        terms_of = self._policy_terms if model == "policy" else self._critic_terms

        def backward(micro: list[int]) -> TokenTerms:
            of_micro = targets.select([sample - mini.samples.start for sample in micro]).to(self._device)
            terms = terms_of(rollouts, micro, of_micro, tally)
            terms.loss.backward()  # type: ignore[no-untyped-call]
            return terms

        for micro in mini.micro_batches:
            if micro:
                tally.add(backward(micro))
            else:  # weights are gathered in every forward, so a rank without work runs one too
                self._idle(model, rollouts)
        norm = network.grad_norm()
        found, problem = f"{model}: {tally.problem}" if tally.problem else None, None
        if found is None and not math.isfinite(norm):
            problem = f"{model}: {self._blame(network, backward, rollouts, mini)}"
        told = self._all.gather([found, problem])  # all ranks make the update, or none
        for said in (*(found for found, _ in told), *(problem for _, problem in told)):
            if said is not None:
                network.forget_gradients()
                raise NumericalError(f"step {self.version + 1}: {said}; nothing was trained on it")
        tally.add_update(model, network.update(norm))
        if model == "policy":
            self._forward.weights_changed()

    def _idle(self, model: str, rollouts: Rollouts) -> None:
        batch = self._packed(rollouts, [0])
        with self._autocast():
            out = self._forward(batch).log_probs if model == "policy" else self._networks[model].module(batch)
        (out.sum() * 0).backward()

    def _blame(
        self, network: Network, backward: Callable[[list[int]], TokenTerms], rollouts: Rollouts, mini: MiniBatch
    ) -> str:
        """Describe a non-finite gradient by its sample on a single rank, else by its mini-batch."""
        for sample in mini.samples if self._ranks.num_ranks == 1 else ():
            network.forget_gradients()
            backward([sample])
            if not math.isfinite(network.grad_norm()):
                return f"the gradient of sample {rollouts.ids[sample]} is not finite"
        first, last = (rollouts.ids[sample] for sample in (mini.samples[0], mini.samples[-1]))
        return f"the gradient of samples {first} to {last} together is not finite"

    def _packed(self, rollouts: Rollouts, samples: Sequence[int]) -> PackedRow:
        tokens = torch.split(rollouts.token_ids[_tokens(rollouts, samples)], rollouts.lengths[list(samples)].tolist())
        prompts = [rollouts.prompt_token_ids[sample] for sample in samples]
        answers = [part.tolist() for part in tokens]
        return pack_sequences(prompts, answers, share_prompts=self._share_prompts).to(self._device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._computes_in == torch.bfloat16)

    @property
    def _computes_in(self) -> torch.dtype:
        return torch.bfloat16 if self._spec.training.autocast == "bfloat16" else torch.float32

    @property
    def _lora_dropout(self) -> bool:
        return self._spec.model.lora is not None and self._spec.model.lora.dropout > 0

    @contextmanager
    def _dropout(self, sample: int) -> Iterator[None]:
        """Enable LoRA dropout, seeded by update and sample so that no random state needs storing."""
        if not self._lora_dropout:
            yield
            return
        with torch.random.fork_rng([] if self._device.type == "cpu" else [self._device], device_type=self._device.type):
            drawn = f"{self._spec.training.seed}:{self._networks['policy'].num_updates}:{sample}"
            torch.manual_seed(int.from_bytes(hashlib.blake2b(drawn.encode(), digest_size=7).digest(), "little"))
            lora.set_dropout(self._policy, True)
            try:
                yield
            finally:
                lora.set_dropout(self._policy, False)

    # -- weights and state ----------------------------------------------------------------------------------

    def policy_state(self) -> dict[str, Tensor]:
        """Return policy weights by Hugging Face name, LoRA merged; {} on a critic's rank. They may alias the model."""
        if "policy" not in self._networks:
            return {}
        weights = self._networks["policy"].weights()
        update = self._spec.model.lora
        return weights if update is None else lora.merged_state(weights, update.alpha / update.rank)

    def own_policy(self) -> dict[str, Tensor]:
        """Return this rank's shards of the policy, or {} with LoRA or tensor parallelism."""
        of_policy = self._networks.get("policy")
        own = of_policy.own_weights() if of_policy is not None and self._spec.model.lora is None else {}
        whole_layers = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)}
        return whole_layers if len(whole_layers) == len(own) else {}

    def critic_state(self) -> dict[str, Tensor]:
        if not self._trains_critic:
            raise InvalidRequest("algorithm.name", self._spec.algorithm.name, "trains no critic")
        own = self._networks["critic"].weights() if "critic" in self._networks else {}
        is_apart = self._ranks.num_ranks < self._all.num_ranks
        return self._all.broadcast(own, source=_MODELS.index("critic")) if is_apart else own

    def state(self) -> State:
        """Return this rank's shards of the training state, which alias the learner's memory."""
        state: State = {"version": self.version}
        for model, network in self._networks.items():
            state |= {model: network.own_weights(), f"{model}_optimizer": network.optimizer_state()}
        if self._spec.model.lora is not None and "policy" in state:
            state["policy"] = lora.adapters(state["policy"])
        return state

    @property
    def leads(self) -> bool:
        """Return whether this rank writes replicated values to checkpoints."""
        return self._ranks.rank == 0

    def load_state(self, state: State) -> None:
        """Restore a state exactly. Only this rank's part of a `StoredTensor` is read."""
        if ("critic" in state) != self._trains_critic:
            raise StorageError("checkpoint", "it has a critic and the job none, or the other way round")
        self.version = int(state["version"])
        for model, network in self._networks.items():
            network.load_weights(state[model])
            network.load_optimizer_state(state[f"{model}_optimizer"])
        if "policy" in self._networks:
            self._forward.weights_changed()

    @property
    def _trains_critic(self) -> bool:
        return "critic" in scoring_stages(self._spec.algorithm)


def share_of(spec: job.Spec, ranks: Ranks) -> tuple[Sequence[str], Ranks]:
    """Return the names of the models that this rank trains, and the group of ranks that train them together."""
    if "critic" not in scoring_stages(spec.algorithm):
        return _MODELS[:1], ranks
    if spec.training.fuse == "auto" and ranks.num_ranks == len(_MODELS) and ranks.tensor is None:
        return (_MODELS[ranks.rank],), Ranks()
    return _MODELS, ranks


def _tokens(rollouts: Rollouts, samples: Sequence[int]) -> Tensor:
    return token_indices(rollouts.lengths, torch.tensor(list(samples)))


def _watch(tally: Tally, rollouts: Rollouts, samples: Sequence[int], numbers: Tensor, what: str) -> None:
    ids = [rollouts.ids[sample] for sample in samples]
    tally.watch(ids, rollouts.lengths[list(samples)].tolist(), numbers.detach(), what)
