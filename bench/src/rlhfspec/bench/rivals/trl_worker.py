"""TRL's GRPO trainer as a baseline for whole training steps. Run by the Python that has TRL.

Options are the fastest on a CPU, where TRL cannot use vLLM: no gradient checkpointing (on by default, and slower), all
samples in one batch, nothing reported or saved.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def variety(completion: str) -> float:
    """Return the reward, the same for TRL and rlhfspec: cheap, and different between samples.

    >>> variety("aab")
    0.25
    """
    return len(set(completion)) / 8


class Stopwatch:
    """Total seconds of wrapped calls by name, reset by `read`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

        return timed

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train; return seconds by stage and tokens of each step, timed from the end of the one before."""
    import torch
    import trl  # type: ignore[import-not-found]
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(arguments["num_threads"])
    watch = Stopwatch()
    steps: list[dict[str, Any]] = []

    class StepRecorder(TrainerCallback):
        began = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            num_tokens = trainer._metrics["train"]["completions/mean_length"][-1] * num_samples
            steps.append({"seconds": now - self.began, "calls": watch.read(), "num_tokens": round(num_tokens)})
            self.began = now

    num_samples = arguments["prompts_per_step"] * arguments["samples_per_prompt"]
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments["model"], padding_side="left"),
        reward_funcs=_rewards,
        args=_config(trl.GRPOConfig, arguments, num_samples),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in arguments["prompts"]]),
        callbacks=[StepRecorder()],
        peft_config=_lora(arguments["lora_rank"]),
    )
    for name in ("_generate", "_calculate_rewards", "_generate_and_score_completions"):
        setattr(trainer, name, watch.around(name, getattr(trainer, name)))
    trainer.train()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"steps": [_step(step) for step in steps], "peak_bytes": peak_bytes, "version": f"TRL {trl.__version__}"}


def _lora(rank: int | None) -> Any:
    if rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def _rewards(completions: list[str], **_: Any) -> list[float]:
    return [variety(completion) for completion in completions]


def _config(make: Callable[..., Any], arguments: dict[str, Any], num_samples: int) -> Any:
    return make(
        output_dir=arguments["folder"],
        use_cpu=True,
        bf16=arguments["dtype"] == "bfloat16",
        max_steps=arguments["steps"],
        per_device_train_batch_size=num_samples,
        gradient_accumulation_steps=1,
        num_generations=arguments["samples_per_prompt"],
        max_completion_length=arguments["num_tokens"],
        generation_kwargs={"min_new_tokens": arguments["num_tokens"]},
        temperature=1.0,
        loss_type="grpo",
        beta=arguments["beta"],
        learning_rate=arguments["learning_rate"],
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        weight_decay=0.01,
        max_grad_norm=1.0,
        optim="adamw_torch",
        gradient_checkpointing=False,
        disable_dropout=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=arguments["seed"],
    )


def _step(measured: dict[str, Any]) -> dict[str, Any]:
    """Return stages that do not overlap; time outside generation and scoring counts as training."""
    calls = measured["calls"]
    generation, reward = calls["_generate"], calls["_calculate_rewards"]
    log_probs = calls["_generate_and_score_completions"] - generation - reward
    by_stage = {"generation": generation, "reward": reward, "reference": log_probs}
    by_stage["training"] = measured["seconds"] - sum(by_stage.values())
    return {"seconds": measured["seconds"], "by_stage": by_stage, "num_tokens": measured["num_tokens"]}


if __name__ == "__main__":
    from serve import serve  # type: ignore[import-not-found]  # beside this file, found by the path of a script

    serve({"train": train})
