"""GPU memory by role, with formulas tested against torch's FakeTensor.

    trainer    (weights + gradients + optimizer) / ranks + gathered + activations; tensorParallel divides all but h
    generator  weights + KV + 2 forwards (`engine/forward/memory.py`)
    scorer     weights + KV of cached prompts + a forward

With widths h (model), i (MLP), q (queries) and v (keys and values), a layer of two norms keeps for each token:

    float32                    16 h + 4 (3 q + v) +  8 i + 4 heads
    bfloat16                    8 h + 2 (3 q + v) +  4 i + 4 heads
    float32, autocast bf16     18 h + 2 (3 q + v) +  4 i + 4 heads     and the weights once more, in bfloat16

Normed queries and keys add 2 or 4 times their width. A recomputed layer keeps only its input, and 8 h and twice the
i while it runs again. The head adds three gradients, or if larger the logits of one part (`modeling.log_probs`), four
times forward and three times backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlhfspec import job
from rlhfspec.errors import InvalidRequest, did_you_mean
from rlhfspec.job.choices.drafters import AUTO, MTP, SELF, may_run_draft_model
from rlhfspec.messages.loop import workers_of
from rlhfspec.training.learning.memory import fits_into
from rlhfspec.training.modeling.log_probs import LOGITS_AT_A_TIME
from rlhfspec.training.planning.shape import ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
_MOMENTS = {"SGD": 1, "Adagrad": 1, "RMSprop": 1}  # other optimizers have Adam's two
_SCORER_CONTEXTS = 9  # of a scorer: the one that runs, and cached prompts
_TREE_ROWS = 17  # per sequence in the largest step: itself and 16 nodes
_PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    role: str
    count: int
    parts: dict[str, int]  # bytes by purpose
    notes: tuple[str, ...] = field(default=())
    fraction: float = 1.0  # of a GPU, that it may take

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def needs_of(spec: job.Spec, shapes: dict[str, ModelShape], gpu_bytes: int, workers: dict[str, int]) -> list[Needs]:
    """Return all roles' needs in order of GPU assignment. shapes: by spec.model field. workers: number by stage."""
    found = [trainer(spec, shapes, gpu_bytes), generator(spec, shapes, gpu_bytes, workers["generator"])]
    for stage in ("reference", "critic"):
        if workers.get(stage):
            found.append(scorer(spec, shapes.get(stage, shapes["path"]), stage, workers[stage]))
    return found


def trainer(spec: job.Spec, shapes: dict[str, ModelShape], gpu_bytes: int) -> Needs:
    parallel = spec.roles.trainer.tensor_parallel
    policy, critic = (shapes.get(name, shapes["path"]).part(parallel) for name in ("path", "critic"))
    ranks, size = spec.roles.trainer.ranks // parallel, BYTES[spec.model.dtype]
    models = [
        (policy, spec.training.optimizer),
        *([(critic, spec.training.critic_optimizer)] if spec.algorithm.entry.has_critic else []),
    ]
    if len(models) == 2 and spec.training.fuse == "auto" and ranks == 2 and parallel == 1:  # one model per rank
        models, ranks = models[:1], 1
    parts = dict.fromkeys(("weights", "gradients", "optimizer", "gathered"), 0)
    trained = 0
    for shape, optimizer in models:
        lora = spec.model.lora if shape is policy else None
        own = shape.lora_parameters(lora.rank, lora.target_modules) if lora else 0
        learns = own or shape.num_parameters
        parts["weights"] += (shape.num_parameters + own) * size // ranks
        parts["gradients"] += learns * size // ranks
        parts["optimizer"] += _MOMENTS.get(optimizer.name, 2) * learns * size // ranks
        parts["gathered"] += _gathered(spec, shape, size) if ranks > 1 else 0
        trained += learns * size // ranks
    num_tokens = max(spec.training.tokens_per_micro_batch, spec.max_context)
    room = fits_into(gpu_bytes - parts["weights"] - parts["gathered"], trained)
    kept = max(activations(spec, shape, num_tokens, again=False) for shape, _ in models)
    again = spec.training.activation_checkpointing == "on" or (
        spec.training.activation_checkpointing == "auto" and kept > room
    )
    parts["activations"] = max(activations(spec, shape, num_tokens, again=again) for shape, _ in models)
    return Needs(role="trainer", count=spec.roles.trainer.ranks, parts=parts, notes=(
        f"{num_tokens} tokens a micro-batch, activations {'recomputed' if again else 'kept'}",
    ))  # fmt: skip


def _is_mixed(spec: job.Spec) -> bool:
    return spec.training.autocast == "bfloat16" and spec.model.dtype == "float32"


def _gathered(spec: job.Spec, shape: ModelShape, size: int) -> int:
    """Return the bytes that FSDP2 gathers at once: embedding, head and two layers."""
    return shape.root_parameters * size + 2 * shape.block_parameters * (2 if _is_mixed(spec) else size)


def activations(spec: job.Spec, shape: ModelShape, num_tokens: int, *, again: bool) -> int:
    is_cast = _is_mixed(spec) and spec.roles.trainer.ranks > spec.roles.trainer.tensor_parallel
    mixed, size = _is_mixed(spec) and not is_cast, 2 if is_cast else BYTES[spec.model.dtype]
    computes = 2 if mixed else size
    a_layer = num_tokens * layer_bytes_a_token(shape, computes, mixed=mixed, again=again)
    copies = (shape.num_layers * shape.block_parameters + shape.head_parameters) * 2 if mixed else 0
    logits = 4 * min(LOGITS_AT_A_TIME, num_tokens * shape.vocab_size * spec.roles.trainer.tensor_parallel)
    beside = (8 if is_cast else 3 * computes) * shape.head_parameters
    head = max(beside, 4 * logits, 3 * logits + computes * shape.head_parameters) + 10 * shape.hidden * num_tokens
    if again:
        inputs = shape.num_layers * num_tokens * shape.hidden * size
        forward = copies + 4 * logits + 10 * shape.hidden * num_tokens
        return inputs + max(head, a_layer + shape.block_parameters * size, forward)
    return shape.num_layers * a_layer + head + max(copies - shape.head_parameters * 2, 0)


def layer_bytes_a_token(shape: ModelShape, size: int, *, mixed: bool, again: bool) -> int:
    """Return a layer's activation bytes per token. mixed: bfloat16 products, float32 weights. again: while rerun."""
    a_norm = (4 if mixed or size == 4 else 2) + 4 * again  # its input and, if rerun, that in float32 or normed
    inputs = 5 * size if mixed else 2 * size  # of matrix products; under autocast each has a copy
    norms = (shape.num_norms * a_norm + inputs) * shape.hidden + (4 + size if again else size) * shape.normed_width
    attention = size * (3 * shape.query_width + shape.kv_width) + 4 * shape.num_heads
    return norms + attention + (4 if again else 2) * size * shape.inner


def generator(spec: job.Spec, shapes: dict[str, ModelShape], gpu_bytes: int, count: int) -> Needs:
    """Return a generator's needs. KV takes the rest of the GPU memory fraction, up to the need of all sequences.

    Tensor parallel processes divide weights and KV heads; only the first holds the drafter.
    """
    processes = spec.num_processes("generator")
    size, generation = BYTES[spec.generation.dtype], spec.generation
    models = [(shapes["path"], processes), *([(shapes["drafter"], 1)] if "drafter" in shapes else [])]
    weights = sum(shape.num_parameters // parts for shape, parts in models) * size
    if spec.model.drafter == MTP:
        weights += shapes["path"].block_parameters * size
    forwards = 2 * max(_forward(shape, size, generation.max_sequences) for shape, _ in models)
    position = sum(shape.num_layers * shape.kv_width // parts for shape, parts in models) * size
    context = spec.max_context + 80  # the room of a tree's nodes, in whole blocks
    wanted = generation.kv_cache_tokens or generation.max_sequences * context
    may_copy = processes == 1 and generation.engine.name == "own" and may_run_draft_model(generation.speculation.mode)
    if may_copy and spec.model.drafter in (AUTO, SELF):
        copy = _in_few_bits(shapes["path"])
        needed = weights + copy + forwards + wanted * position
        if spec.model.drafter == SELF or needed <= generation.gpu_memory_fraction * gpu_bytes:  # auto may go without
            weights += copy
    left = max(int(generation.gpu_memory_fraction * gpu_bytes) - weights - forwards, 0) // position
    tokens = wanted if generation.kv_cache_tokens else max(min(wanted, left), context)
    note = f"KV of {tokens:,} tokens: {tokens // context} of {generation.max_sequences} sequences at full length"
    parts = {"weights": weights, "KV": tokens * position, "forwards": forwards}
    return Needs(
        role="generator", count=count * processes, parts=parts, notes=(note,), fraction=generation.gpu_memory_fraction
    )


def _in_few_bits(shape: ModelShape) -> int:
    """Return the bytes of a copy with 4.5 bits a weight of the layers and 8.5 of the head (few_bit_linear.py)."""
    return (9 * shape.num_layers * shape.block_parameters + 17 * shape.head_parameters) // 16


def scorer(spec: job.Spec, shape: ModelShape, stage: str, count: int) -> Needs:
    size = BYTES[spec.model.dtype]
    kv = _SCORER_CONTEXTS * (spec.max_context + 32) * shape.num_layers * shape.kv_width * size
    parts = {"weights": shape.num_parameters * size, "KV": kv, "forwards": _forward(shape, size, 0)}
    return Needs(role=stage, count=count, parts=parts)


def _forward(shape: ModelShape, size: int, num_sequences: int) -> int:
    """Return the bytes of one forward: a prefill chunk plus a tree per sequence."""
    logits = max(num_sequences * _TREE_ROWS, min(_PREFILL_ROWS, (1 << 26) // shape.vocab_size))
    rows = _PREFILL_ROWS + num_sequences * _TREE_ROWS
    a_layer = rows * size * (3 * shape.hidden + 2 * shape.inner + 2 * shape.query_width + shape.kv_width)
    return a_layer + logits * shape.vocab_size * (size + 8)


def counts(whole: job.RLHFJob) -> dict[str, int]:
    replicas = whole.spec.roles.generator.replicas
    return workers_of(whole) | ({"generator": replicas.max} if replicas else {})


def sum_of(needs: Needs) -> str:
    """Format the parts and the total of a role in GB.

    >>> sum_of(Needs(role="generator", count=1, parts={"weights": 16_060_000_000, "KV": 8_590_000_000}))
    'weights 16.1 + KV 8.6 = 24.6 GB'
    """
    parts = " + ".join(f"{name} {size / 1e9:.1f}" for name, size in needs.parts.items() if size)
    return f"{parts} = {needs.total / 1e9:.1f} GB"


# Vendors' GB. Drivers report a few percent more, which is left to the driver and NCCL.
KNOWN = {
    "a10g": 24, "l4": 24, "v100": 32, "a100-40gb": 40, "l40s": 48, "a100": 80, "h100": 80, "h200": 141, "b200": 180,
    "mi300x": 192,
}  # fmt: skip
# GB/s of the trainer that puts a version, and of each receiver: bench/weights.py, measured on CPUs
RATES = {"file": (1.45, 0.78), "grpc": (1.66, 0.33)}


def memory_of(given: str) -> int:
    """Return a GPU's memory in bytes, from its name or a number of GB.

    >>> memory_of("h100"), memory_of("96")
    (80000000000, 96000000000)
    """
    number = given.strip().lower().removesuffix("gb")
    if number.replace(".", "", 1).isdecimal() and float(number) > 0:
        return int(float(number) * 10**9)
    if given.lower() not in KNOWN:
        hint = did_you_mean(given.lower(), KNOWN)
        raise InvalidRequest("--gpu-memory", given, f"must be a number of GB or one of {', '.join(KNOWN)}{hint}")
    return KNOWN[given.lower()] * 10**9


def weights_seconds(num_bytes: int) -> Iterator[tuple[str, float]]:
    """Yield each way of weight transfer, with its seconds from trainer to generator.

    >>> [f"{way} {seconds:.0f} s" for way, seconds in weights_seconds(16_060_000_000)]
    ['file 32 s', 'grpc 58 s']
    """
    for way, (put, get) in RATES.items():
        yield way, num_bytes / put / 1e9 + num_bytes / get / 1e9
