"""Cache of load-time proofs: in the rooms of `ROOMS` a model is proved once per class, configuration and weights."""

import functools
import hashlib
from collections.abc import Callable, Generator
from typing import Any

import pytest

ROOMS = (
    "bench", "choices", "cli", "engine", "generator", "learning", "loop", "migration", "rebalancer", "runs", "scoring",
    "stage", "telemetry", "trainer", "weights",
)  # fmt: skip
EXAMINE = ("rlhfspec.engine.forward.runner.examine", "rlhfspec.training.modeling.loading.examine")
ASK = ("rlhfspec.engine.forward.runner.ask", "rlhfspec.training.modeling.loading.ask")


def told_by(model: Any) -> tuple[object, ...]:
    """Return the cache key: classes of the modules, configuration and bits of the weights."""
    import torch

    digest = hashlib.blake2b()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    classes = tuple((path, type(module)) for path, module in model.named_modules())
    config = model.config
    return classes, repr(config), config._attn_implementation, model.training, digest.digest()


@functools.cache
def examined(examine: Callable[..., Any]) -> Callable[..., Any]:
    from rlhfspec.huggingface.structure.causal_lm import keep_anatomy

    known: dict[object, Any] = {}

    def once(model: Any, *, name: str, max_context: int) -> Any:
        key = (told_by(model), max_context)
        if key not in known:
            known[key] = examine(model, name=name, max_context=max_context)
        keep_anatomy(model, known[key])
        return known[key]

    return once


@functools.cache
def asked(ask: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[object, Any] = {}

    def once(model: Any, anatomy: Any, probes: Any, *, name: str, rounding: Any) -> Any:
        how = (rounding.activations, rounding.dtype, rounding._rounds_rows)
        key = (told_by(model), anatomy, tuple(map(repr, probes)), name, how)
        if key not in known:
            known[key] = ask(model, anatomy, probes, name=name, rounding=rounding)
        return known[key]

    return once


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    is_one = any(item.get_closest_marker(tier) for tier in ("torch", "runs")) and item.path.parent.name in ROOMS
    with pytest.MonkeyPatch.context() as patch:
        if is_one:
            from rlhfspec.huggingface.proof.reference import ask
            from rlhfspec.huggingface.structure.anatomy import examine

            for place in EXAMINE:
                patch.setattr(place, examined(examine))
            for place in ASK:
                patch.setattr(place, asked(ask))
        return (yield)
