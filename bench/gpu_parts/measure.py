"""Shared parts of a GPU day: device, timers, results, and models with random weights."""

from __future__ import annotations

import copy
import importlib
import json
import operator
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine

COMPARE = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}
BLOCK = 1 << 22  # weights that are drawn; the others repeat them


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a measurement. `expected` is a bound such as "<= 0.1", or empty for none."""

    part: str
    name: str
    value: Any
    unit: str = ""
    expected: str = ""

    @property
    def is_met(self) -> bool | None:
        if not self.expected:
            return None
        how, bar = self.expected.split()
        return bool(COMPARE[how](float(self.value), float(bar)))


@dataclass(frozen=True, slots=True)
class Day:
    """Settings of a GPU day: device, results file, and whether models have real sizes."""

    device: torch.device
    is_real: bool
    out: Path  # one line of JSON a result

    @classmethod
    def on(cls, name: str, out: Path) -> Day:
        if name == "second":
            sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
            importlib.import_module("second_device").load()
            torch.__future__.set_swap_module_params_on_conversion(True)  # as its tests have it
        return cls(torch.device(name), is_real=name == "cuda", out=out)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_real else torch.float32

    def tell(self, part: str, name: str, value: Any, unit: str = "", expected: str = "") -> None:
        """Write and print a result; `expected` is ignored unless the device is a real GPU."""
        value = float(f"{value:.4g}") if isinstance(value, float) else value
        self.write(asdict(Found(part, name, value, unit, expected if self.is_real else "")))

    def write(self, result: dict[str, Any]) -> None:
        with self.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(line_of(result), flush=True)

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 10) -> float:
        """Return the median seconds of `work` on the device, after two warm-up runs."""
        repeats = repeats if self.is_real else 2
        times = []
        for number in range(repeats + 2):
            began = time.perf_counter()
            if self.device.type == "cuda":
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                work()
                last.record()
                last.synchronize()
                took = first.elapsed_time(last) / 1e3
            else:
                work()
                took = time.perf_counter() - began
            times += [took] if number > 1 else []
        return statistics.median(times)

    def peak_bytes(self) -> int:
        """Return the device's peak memory since `forget_peak`."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def line_of(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['part']:<12} FAILED  {result['error'].strip()}"
    found = Found(**result)
    verdict = "" if found.is_met is None else "as expected" if found.is_met else "NOT AS EXPECTED"
    expected = f"(expected {found.expected})" if found.expected else ""
    return f"{found.part:<12} {found.name:<48} {found.value!s:>14} {found.unit:<10} {expected} {verdict}".rstrip()


def llama(day: Day, *, layers: int, size: str) -> Any:
    """Return a random Llama of size "8B" or "1.5B" with fewer layers, or a tiny one without a GPU."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shapes = {"8B": (4096, 14336, 32, 8, 128256), "1.5B": (1536, 8960, 12, 2, 151936), "tiny": (64, 128, 4, 2, 260)}
    hidden, inner, heads, kv_heads, vocab = shapes[size if day.is_real else "tiny"]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        vocab_size=vocab, num_hidden_layers=layers if day.is_real else 2, max_position_embeddings=40_000,
        tie_word_embeddings=size != "8B", bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rotary = model.model.rotary_emb
    model = model.to_empty(device="cpu").eval()
    fill(model)
    model.model.rotary_emb = type(rotary)(config=config)  # its angles were on "meta" too
    model.tie_weights()
    return model


def fill(model: torch.nn.Module) -> None:
    """Fill in random weights quickly, with logits sharp enough to tell tokens apart."""
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            flat = parameter.view(-1)
            if parameter.ndim == 1:
                flat.fill_(1.0)
                continue
            turned = block.roll(number * 7919) * (1.2 / parameter.shape[-1] ** 0.5)
            for start in range(0, len(flat), BLOCK):
                flat[start : start + BLOCK] = turned[: len(flat) - start]


def engine_of(day: Day, model: Any, *, keep: bool = True, draft: Any = None, **options: Any) -> Engine:
    """Create an engine on the device, with a copy of the model if `keep`."""
    config = {"device": str(day.device), "dtype": str(day.dtype).removeprefix("torch."), "profile": False} | options
    return make_engine(copy.deepcopy(model) if keep else model, EngineConfig(**config), draft=draft)


def requests(rows: int, *, prompt: int, answer: int, vocab: int, echo: bool = False) -> list[Request]:
    """Return `rows` requests with distinct prompts; with `echo` they repeat a phrase, for suffix drafters."""
    drawn = torch.Generator().manual_seed(7)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0 if echo else 1.0)
    made = []
    for row in range(rows):
        tokens = torch.randint(3, vocab, (16 if echo else prompt,), generator=drawn).tolist()
        whole = tuple((tokens * (-(-prompt // len(tokens))))[:prompt])
        made.append(Request(id=f"r{row}", prompt_token_ids=whole, params=params, seed=1_000 + row))
    return made


def run(engine: Engine, asked: list[Request], *, each_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run the requests and return all completions by id."""
    for request in asked:
        engine.submit(request)
    done = {}
    while engine.has_work:
        done.update({completion.id: completion for completion in engine.step().finished})
        each_step()
    return done
