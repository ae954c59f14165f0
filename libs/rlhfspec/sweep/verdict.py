"""One model, judged from outside: the engine in all its ways against an oracle that shares no code with it.

The oracle (`rlhfspec.engine.oracle`) runs plain Hugging Face in eager mode, the whole prefix anew for each token, and
has the law written a second time. A model is *right* when

- every token is the oracle's, and every log-prob too, to 1e-5 (where plain Hugging Face is further than that from
  itself in float64: as near to that as plain Hugging Face is, times 3);
- the same sequences give the same bits one at a time and together, in chunks, with one thread and two, with trees of
  drafts, with the suffix drafter, preempted, and moved from engine to engine in the middle; in float32 and in bfloat16;
- the trainer's forward finds the same log-probs to 1e-5, and the exact trainer the same bits, with gradients like
  torch's; also under a low-rank update.

It is *refused* when loading it says why. Anything else is *wrong*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rlhfspec import job
from rlhfspec.drafting.base import Plan
from rlhfspec.engine import oracle
from rlhfspec.engine.base import Completion, Request
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine
from rlhfspec.engine.loading import make_engine
from rlhfspec.engine.params import SamplingParams
from rlhfspec.errors import InvalidRequest, UnsupportedModel
from rlhfspec.huggingface.attention import use_eager_experts
from rlhfspec.huggingface.causal_lm import anatomy_of
from rlhfspec.modeling.exact import ExactForward
from rlhfspec.modeling.loading import prepared
from rlhfspec.modeling.log_probs import TorchForward
from rlhfspec.modeling.lora import add_lora, merged_state
from rlhfspec.modeling.packed import Packed, pack_sequences
from rlhfspec.tiny import perturbed

Kind = Literal["right", "refused", "wrong", "not made"]
PROMPT_LENGTHS = (5, 37, 2, 70)  # shorter and longer than blocks of keys, and than most windows of the sweep
MAX_TOKENS = 24
_CONTEXT = 128
_TREE = Plan(drafter="model", depth=4, width=2, branch=2)
TOLERANCE = 1e-5  # of log-probs and their margins
GRADIENT_TOLERANCE = 1e-4
Samples = dict[str, Completion]


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    detail: str = ""  # why it is not right; or why it cannot be trained exactly on-policy
    path: str = ""  # "native" or "layers"
    difference: float = 0.0  # the largest, of log-probs to the oracle's


class Wrong(Exception):
    """What was found not to be so."""


def judge(make: Callable[[], Any], *, trainer: bool = True, max_tokens: int = MAX_TOKENS) -> Verdict:
    """`make` returns the model anew whenever it is called."""
    try:
        return _judged(make, trainer=trainer, max_tokens=max_tokens)
    except (UnsupportedModel, InvalidRequest) as error:
        return Verdict("refused", f"{error.value}: {error.problem}")
    except Wrong as error:
        return Verdict("wrong", str(error))


def _judged(make: Callable[[], Any], *, trainer: bool, max_tokens: int) -> Verdict:
    plain = _engine(make())
    requests = list(_requests(plain.target.num_token_ids, max_tokens))
    alone = one_by_one(plain, requests)
    difference = _compare_with_oracle(make, requests, alone)
    drafted = _engine(make(), draft=perturbed(make(), 0.1), speculation=_TREE, num_threads=2, prefill_chunk=11)
    _same("together, with trees and two threads", alone, together(drafted, requests))
    suffix = _engine(make(), speculation="suffix")
    _same("preempted, with the suffix drafter", alone, together(suffix, requests, every_step=_preempt))
    _same("moved from engine to engine", alone, moving(drafted, suffix, requests))
    rounded = one_by_one(_engine(make(), dtype="bfloat16"), requests)
    drafted = _engine(make(), draft=perturbed(make(), 0.1), dtype="bfloat16", speculation=_TREE, num_threads=2)
    _same("together, with trees, in bfloat16", rounded, together(drafted, requests))
    not_exact = ""
    if trainer:
        _check_trainer(make, alone)
        try:
            _check_exact(make, alone, "float32")
            _check_lora(make, requests)
            _check_exact(make, rounded, "bfloat16")
        except UnsupportedModel as error:
            not_exact = f"not exactly on-policy: {error.value}: {error.problem}"
    return Verdict("right", not_exact, plain.target.report.path, difference)


def _engine(model: Any, **options: Any) -> Engine:
    usual: dict[str, Any] = {
        "max_sequences": 4,
        "max_context": _CONTEXT,
        "profile": False,
        "num_threads": 1,
        "speculation": "off",
    }
    draft = options.pop("draft", None)
    return make_engine(model, EngineConfig(**(usual | options)), draft=draft)


def _requests(num_token_ids: int, max_tokens: int) -> Iterator[Request]:
    draw = np.random.default_rng(0)
    for index, (length, temperature) in enumerate(zip(PROMPT_LENGTHS, (1.0, 0.7, 1.0, 0.0), strict=True)):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        prompt = tuple(draw.integers(0, num_token_ids, length).tolist())
        yield Request(id=f"r{index}", prompt_token_ids=prompt, params=params, seed=11 + index)


# ---- the engine's ways ----------------------------------------------------------------------------------------------


def one_by_one(engine: Engine, requests: Sequence[Request]) -> Samples:
    return {request.id: together(engine, [request])[request.id] for request in requests}


def together(
    engine: Engine, requests: Sequence[Request], every_step: Callable[[Engine, int], None] = lambda engine, step: None
) -> Samples:
    for request in requests:
        engine.submit(request)
    done: Samples = {}
    step = 0
    while engine.has_work:
        done |= {each.id: each for each in engine.step().finished}
        every_step(engine, step := step + 1)
    engine.check_integrity()
    return done


def _preempt(engine: Engine, step: int) -> None:
    if step % 3 == 0 and engine.scheduler.running:
        engine.preempt(engine.scheduler.running[step % len(engine.scheduler.running)].request.id)


def moving(one: Engine, other: Engine, requests: Sequence[Request]) -> Samples:
    """Every few steps each sequence goes from the engine that has it to the other one."""
    engines, done, step = (one, other), Samples(), 0
    for request in requests:
        one.submit(request)
    while one.has_work or other.has_work:
        for engine in engines:
            done |= {each.id: each for each in engine.step().finished} if engine.has_work else {}
        if (step := step + 1) % 4 == 0:
            places = [(sequence, engine) for engine in engines for sequence in list(engine.sequences)]
            for sequence, engine in places:
                engines[engine is one].import_sequence(engine.export_sequence(sequence))
    one.check_integrity()
    other.check_integrity()
    return done


def _same(how: str, wanted: Samples, found: Samples) -> None:
    for name, sample in wanted.items():
        other = found[name]
        if sample.error or other.error:
            raise Wrong(f"{how}: {sample.error or other.error}")
        if sample.token_ids != other.token_ids:
            raise Wrong(f"{how}: other tokens than alone")
        if (sample.log_probs, sample.tempered_log_probs) != (other.log_probs, other.tempered_log_probs):
            raise Wrong(f"{how}: other bits than alone")


@torch.inference_mode()
def _compare_with_oracle(make: Callable[[], Any], requests: Sequence[Request], samples: Samples) -> float:
    """The largest difference of a log-prob."""
    model = _plain(make())
    theirs = {
        request.id: oracle.decode(
            model,
            list(request.prompt_token_ids),
            request.params,
            request.seed,
            forced=list(samples[request.id].token_ids),
        )
        for request in requests
        if not samples[request.id].error
    }
    for name, sample in samples.items():
        if sample.error:
            raise Wrong(sample.error)
        for ours, token, margin in zip(sample.token_ids, theirs[name].token_ids, theirs[name].margins, strict=True):
            if ours != token and margin > TOLERANCE:
                raise Wrong(f"another token than the oracle's, which leads by {margin:.1e}")
    wanted = torch.tensor([number for sample in theirs.values() for number in sample.log_probs], dtype=torch.float64)
    difference = float((_generated(samples).double() - wanted).abs().max())
    if difference > TOLERANCE and not _is_rounding(make, samples, _generated(samples)):
        raise Wrong(f"log-probs differ from the oracle's by {difference:.1e}")
    return difference


@torch.inference_mode()
def _is_rounding(make: Callable[[], Any], samples: Samples, ours: torch.Tensor) -> bool:
    """In float64 a model is nearly itself: are we hardly further from that than Hugging Face is in float32?"""
    truth, theirs = _whole(_plain(make().double()), samples), _whole(_plain(make()), samples)
    return bool((ours.double() - truth).abs().max() <= 3 * (theirs - truth).abs().max())


def _whole(model: Any, samples: Samples) -> torch.Tensor:
    """Log-probs of every sample by one forward each."""
    found = []
    for sample in samples.values():
        tokens = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
        log_probs = model(input_ids=tokens, use_cache=False).logits[0].double().log_softmax(-1)
        first = len(sample.prompt_token_ids) - 1
        found.append(log_probs[first:-1].gather(1, tokens[0, first + 1 :, None])[:, 0])
    return torch.cat(found)


def _plain(model: Any) -> Any:
    """Hugging Face's own code, in eager mode."""
    model.set_attn_implementation("eager")
    use_eager_experts(model)
    return model


# ---- the trainer's --------------------------------------------------------------------------------------------------


def _packed(samples: Samples) -> Packed:
    return pack_sequences([s.prompt_token_ids for s in samples.values()], [s.token_ids for s in samples.values()])


def _generated(samples: Samples) -> torch.Tensor:
    return torch.tensor([number for sample in samples.values() for number in sample.log_probs])


def _check_trainer(make: Callable[[], Any], samples: Samples) -> None:
    with torch.no_grad():
        found = TorchForward(prepared(make(), max_context=_CONTEXT), 1.0)(_packed(samples)).log_probs
    difference = float((found - _generated(samples)).abs().max())
    if difference > TOLERANCE and not _is_rounding(make, samples, found):
        raise Wrong(f"the trainer's log-probs differ by {difference:.1e}")


def _check_exact(make: Callable[[], Any], samples: Samples, dtype: str) -> None:
    exact = ExactForward(prepared(make(), max_context=_CONTEXT), 1.0, max_context=_CONTEXT, dtype=dtype)
    found = exact(_packed(samples))
    if not torch.equal(found.untempered, _generated(samples)):
        raise Wrong(f"the exact trainer gives other bits in {dtype}")
    if dtype == "float32":
        plain = TorchForward(prepared(make(), max_context=_CONTEXT), 1.0)
        _same_gradients(exact, plain, _packed(samples))


def _same_gradients(exact: TorchForward, plain: TorchForward, batch: Packed) -> None:
    weights = torch.linspace(-1, 1, len(batch.targets))
    for forward in (exact, plain):
        (forward(batch).log_probs * weights).sum().backward()
    theirs = {name: parameter.grad for name, parameter in plain.model.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in theirs.values() if grad is not None)
    for name, parameter in exact.model.named_parameters():
        if (parameter.grad is None) != (theirs[name] is None):
            raise Wrong(f"the exact trainer's gradient of {name} is missing, or too many")
        if parameter.grad is not None:
            scale = theirs[name].abs().max().clamp_min(1e-2 * largest)  # some have no gradient but rounding
            if (difference := float((parameter.grad - theirs[name]).abs().max() / scale)) > GRADIENT_TOLERANCE:
                raise Wrong(f"the exact trainer's gradient of {name} differs by {difference:.1e} of the largest")


def _check_lora(make: Callable[[], Any], requests: Sequence[Request]) -> None:
    """Merged weights in the engine, the update by itself in the trainer."""
    policy = prepared(make(), max_context=_CONTEXT)
    targets = _update_targets(policy)
    if not targets:
        return
    add_lora(policy, job.Lora(rank=2, targetModules=targets), seed=1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:  # zero at first
                parameter.copy_(0.05 * torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    engine = _engine(make())
    scaling = job.Lora(rank=2).alpha / 2
    engine.load_weights(merged_state(policy.state_dict(), scaling), version=1)
    samples = one_by_one(engine, requests)
    exact = ExactForward(policy, 1.0, max_context=_CONTEXT)
    if not torch.equal(exact(_packed(samples)).untempered, _generated(samples)):
        raise Wrong("the exact trainer gives other bits under a low-rank update")


def _update_targets(policy: Any) -> list[str]:
    """Names that belong to linear layers of the decoder and to nothing else."""
    head = policy.get_output_embeddings()
    linear, other = set[str](), {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}  # of experts too
    for path, module in policy.named_modules():
        runs = path in anatomy_of(policy).called and type(module) is torch.nn.Linear and module is not head
        (linear if runs else other).add(path.rpartition(".")[2])
    return sorted(name for name in linear - other if not name.isdigit())
