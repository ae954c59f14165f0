"""The engine `vllm` of `rlhfspec.job.choices.engines`, built from a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfspec.engine.vllm.client import VllmEngine
from rlhfspec.engine.vllm.finding import INSTALL_VLLM, find_python
from rlhfspec.engine.vllm.process import VllmEnded, VllmProcess
from rlhfspec.errors import EngineFailed, InvalidRequest
from rlhfspec.huggingface.devices import device_of, settled
from rlhfspec.huggingface.heads.eagle import is_eagle
from rlhfspec.huggingface.structure.positions import max_context
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.drafters import ADAPTIVE, AUTO, OFF
from rlhfspec.job.choices.vllm_arguments import BATCH_INVARIANT, NUM_DRAFT_TOKENS, PYTHON
from rlhfspec.kernels.cpu.build import supports

_NUM_DRAFT_TOKENS = 4
_SMALL_BYTES = 2 << 30  # of weights: small enough to load a second time and compare logits
_LOGITS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of logits, relative to the largest
NO_DRAFTS = "must be off on a CPU without AVX-512: vLLM's drafted steps give NaN there after some dozens of sequences"
FIELD_OF = {
    "max_model_len": "dataset.maxPromptTokens", "num_gpu_blocks_override": "generation.kvCacheTokens",
    "dtype": "generation.dtype", "speculative": "generation.speculation.mode",
    "tensor_parallel_size": "roles.generator.tensorParallel",
}  # fmt: skip


def make(job: RLHFJob, load_tokenizer: Callable[[], Any]) -> VllmEngine:
    device = device_of(job.spec)
    spec = settled(job.spec, device)  # for vLLM, auto would be the checkpoint's dtype, in 16 bits
    job = job.model_copy(update={"spec": spec})
    given = dict(spec.generation.engine.arguments)
    python = find_python(given.pop(PYTHON, None))
    if python is None:
        raise InvalidRequest("spec.generation.engine", "vllm", INSTALL_VLLM)
    strategy, speculation = speculative_config(job, given.pop(NUM_DRAFT_TOKENS, _NUM_DRAFT_TOKENS))
    if speculation is not None and not drafts_right(device):
        raise InvalidRequest("spec.generation.speculation.mode", spec.generation.speculation.mode, NO_DRAFTS)
    environment = _environment(spec.model.path, batch_invariant=given.pop(BATCH_INVARIANT, False))
    context = max_context(job)
    max_sequences = min(spec.generation.max_sequences, spec.samples_in_flight)
    arguments = _arguments(job, device, context, max_sequences) | {"speculative_config": speculation} | given
    orders: dict[str, dict[str, Any]] = {
        "open": {"device": device.partition(":")[0], "arguments": arguments, "field_of": FIELD_OF},
        "trial": {"model": spec.model.path, "dtype": spec.generation.dtype, "compares": _is_small(spec.model.path)},
    }
    deadline = spec.roles.generator.deadline_seconds
    child = VllmProcess(python, orders, environment)
    try:
        opened = child.start()
    except VllmEnded as ended:
        raise EngineFailed("vllm", f"does not start: {ended}") from None
    _refuse_unless_right(child, opened, spec.generation.dtype)
    return VllmEngine(
        child, opened, max_context=context, max_sequences=max_sequences, step_seconds=deadline / 2,
        strategy=strategy, tokenizer=load_tokenizer(),
    )  # fmt: skip


def drafts_right(device: str) -> bool:
    return device != "cpu" or supports("avx512")


def speculative_config(job: RLHFJob, num_draft_tokens: int) -> tuple[str, dict[str, Any] | None]:
    """Return vLLM's drafter name and settings for the job's speculation mode."""
    mode, drafter = job.spec.generation.speculation.mode, job.spec.model.drafter
    if mode == OFF or (mode == ADAPTIVE and drafter in (None, AUTO)):
        return OFF, None
    if mode == "suffix":
        ngram = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
        return "ngram", {**ngram, "num_speculative_tokens": num_draft_tokens}
    if mode not in (ADAPTIVE, "model"):
        raise InvalidRequest("spec.generation.speculation.mode", mode, "vllm takes adaptive, off, suffix or model")
    if drafter == AUTO:
        raise InvalidRequest("spec.model.drafter", AUTO, "must name a draft model: the engine vllm cannot choose one")
    method = "eagle3" if drafter is not None and is_eagle(drafter) else "draft_model"
    return method, {"method": method, "model": drafter, "num_speculative_tokens": num_draft_tokens}


def _arguments(job: RLHFJob, device: str, context: int, max_sequences: int) -> dict[str, Any]:
    spec, on_cpu = job.spec, device == "cpu"
    block_size = spec.generation.engine.arguments.get("block_size", 128 if on_cpu else 16)
    tokens = spec.generation.kv_cache_tokens
    blocks = None if tokens is None else -(-tokens // block_size)
    if blocks is None and on_cpu:
        blocks = max_sequences * (-(-context // block_size) + 1)
    return {
        "model": spec.model.path,
        "skip_tokenizer_init": True,
        "dtype": spec.generation.dtype,
        "max_model_len": context,
        "max_num_seqs": max_sequences,
        "block_size": block_size,
        "num_gpu_blocks_override": None if blocks is None else blocks + 1,  # one is vLLM's own
        "tensor_parallel_size": spec.roles.generator.tensor_parallel,
        "gpu_memory_utilization": spec.generation.gpu_memory_fraction,
        "enforce_eager": on_cpu,
        "worker_cls": "rlhfspec.engine.vllm.inside.worker.LawWorker",
        "async_scheduling": False,  # weights are swapped between two steps
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "seed": 0,
    }


def _environment(model: str, *, batch_invariant: bool) -> dict[str, str]:
    found = {"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {}
    return found | ({"HF_HUB_OFFLINE": "1"} if Path(model).exists() else {})


def _is_small(path: str) -> bool:
    files = [*Path(path).glob("*.safetensors")]
    return bool(files) and sum(os.stat(each).st_size for each in files) <= _SMALL_BYTES


def _refuse_unless_right(child: VllmProcess, opened: dict[str, Any], dtype: str) -> None:
    problems = list(opened["problems"])
    difference = opened["difference"]
    if difference is not None and not difference <= _LOGITS_TOLERANCE[dtype]:
        problems.append(f"its logits differ from Hugging Face's by {difference:.2g} of the largest logit")
    if problems:
        child.close()
        raise InvalidRequest("spec.model.path", opened["model"], f"vLLM does not follow docs/law.md: {problems[0]}")
