"""Host of vLLM's engine core in this process, one step at a time."""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine

from rlhfspec.engine.vllm.inside.made import Made
from rlhfspec.kernels.cpu import build

# Versions whose samplers this package replaces. Private names change between versions, so others are refused; `make
# setup-vllm` installs the first.
SUPPORTED = ("0.32.0",)
_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_TRIAL: tuple[dict[str, Any], ...] = tuple(
    {
        "prompt": _PROMPT,
        "max_tokens": 4,
        "stop_token_ids": [],
        "law": {"seed": 7, "temperature": temperature, "top_k": top_k, "top_p": top_p, "num_prompt": len(_PROMPT)},
    }
    for temperature, top_k, top_p in ((0.8, 0, 1.0), (2.0, 50, 0.9))
)


class ChildRefused(Exception):
    """Error that the user must fix in `field` of the job's spec."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(problem)


def in_one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in said
    kind = "out of memory (lower generation.kvCacheTokens or maxSequences)" if is_memory else type(error).__name__
    return f"{kind}: {said[:300]}"


class Host:
    def __init__(self) -> None:
        self._schedule: Any = None  # of the last pass
        self._num_preempted = 0

    def open(self, *, device: str, arguments: dict[str, Any], field_of: dict[str, str]) -> dict[str, Any]:
        if vllm.__version__ not in SUPPORTED:
            known = " or ".join(SUPPORTED)
            raise ChildRefused("generation.engine", f"vLLM {vllm.__version__} is not supported, only {known}")
        platform = "cpu" if current_platform.is_cpu() else current_platform.device_name
        if (platform == "cpu") != (device == "cpu"):
            raise ChildRefused("device", f"this vLLM was built for {platform}, and the job runs on {device}")
        build.set_num_threads(torch.get_num_threads())
        try:
            config = vllm.EngineArgs(**arguments).create_engine_config()
        except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
            said = in_one_line(error)
            field = next((field for name, field in field_of.items() if name in said), "generation.engine.arguments")
            raise ChildRefused(field, said) from error
        self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._core: Any = self._engine.engine_core
        self._scheduler = self._core.engine_core.scheduler
        self._note_schedules()
        model = config.model_config
        return {
            "version": vllm.__version__,
            "arithmetic": f"vllm-{'.'.join(vllm.__version__.split('.')[:2])}-{platform}",
            "model": model.architecture,
            "num_token_ids": model.get_vocab_size(),
            "eos_token_ids": _eos_token_ids(model),
            "block_size": config.cache_config.block_size,
            "num_blocks": self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,  # one is vLLM's own
        }

    def _note_schedules(self) -> None:
        schedule, preempt = self._scheduler.schedule, self._scheduler._preempt_request

        def noting(*arguments: Any, **options: Any) -> Any:
            self._schedule = schedule(*arguments, **options)
            return self._schedule

        def counting(*arguments: Any, **options: Any) -> Any:
            self._num_preempted += 1
            return preempt(*arguments, **options)

        self._scheduler.schedule, self._scheduler._preempt_request = noting, counting

    def trial(self, *, model: str, dtype: str, compares: bool) -> dict[str, Any]:
        began = time.perf_counter()
        self._core.collective_rpc("watch")
        self.step(add=[{**each, "name": f"trial-{index}"} for index, each in enumerate(_TRIAL)], cancel=[])
        while self._scheduler.requests:
            self.step(add=[], cancel=[])
        logits = self._core.collective_rpc("first_logits")[0]
        problems = [problem for rank in self._core.collective_rpc("judge") for problem in rank]
        difference = _difference_to_hugging_face(model, dtype, logits) if compares else None
        return {"problems": problems[:3], "difference": difference, "seconds": time.perf_counter() - began}

    def begin(self, *, weights: str | None) -> dict[str, Any]:
        self._core.abort_requests(list(self._scheduler.requests))
        return self._gauges() if weights is None else self.load(weights=weights)

    def load(self, *, weights: str) -> dict[str, Any]:
        """Load weights and preempt running sequences, whose KV belongs to the old weights."""
        lacking = sorted({name for rank in self._core.collective_rpc("load_version", args=(weights,)) for name in rank})
        if lacking:  # vLLM only warns
            raise ChildRefused("model.path", f"new weights lack {len(lacking)} tensors, such as {lacking[0]}")
        if not self._core.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache, which still holds KV of the previous weights")
        return self._gauges()

    def step(self, *, add: list[dict[str, Any]], cancel: list[str], ahead_seconds: float = 0.0) -> dict[str, Any]:
        """Run at least one forward pass, for up to `ahead_seconds` until a sequence finishes or prefills."""
        began = time.perf_counter()
        if cancel:
            self._core.abort_requests(cancel)
        for each in add:
            self._core.add_request(_request(**each))
        made = Made()
        while True:
            self._schedule = None
            made.take(self._core.get_output().outputs, self._schedule)
            if made.is_to_be_told or time.perf_counter() - began >= ahead_seconds:
                return made.answer() | self._gauges()

    def _gauges(self) -> dict[str, int]:
        scheduler = self._scheduler
        return {
            "num_running": len(scheduler.running),
            "num_requests": len(scheduler.requests),
            "num_preempted": self._num_preempted,
            "num_free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }


def _request(
    *, name: str, prompt: list[int], max_tokens: int, stop_token_ids: list[int], law: dict[str, Any]
) -> EngineCoreRequest:
    """Build a vLLM request, greedy because the law replaces vLLM's sampling. `stop_token_ids` include EOS."""
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=True, detokenize=False,
        logprobs=1, extra_args={"law": law},
    )  # fmt: skip
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=prompt, mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip


def _eos_token_ids(model: Any) -> list[int]:
    generation = model.try_get_generation_config()
    eos = generation.get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    return eos if isinstance(eos, list) else [] if eos is None else [int(eos)]


def _difference_to_hugging_face(model: str, dtype: str, logits: list[float]) -> float:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        expected = theirs(input_ids=torch.tensor([_PROMPT]), use_cache=False).logits[0, -1].float()
    ours = torch.tensor(logits)[: len(expected)]
    return float((ours - expected).abs().max() / expected.abs().max())
