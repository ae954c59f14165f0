"""Peak memory of the real training step on FakeTensors of the second device, at any model size."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.huggingface.structure.attention import AttentionSpec
from rlhfspec.huggingface.structure.causal_lm import Anatomy, keep_anatomy
from rlhfspec.job import Spec
from rlhfspec.training.learning import sharding
from rlhfspec.training.learning.optim import make_optimizer
from rlhfspec.training.modeling import lean, packed, tensor_parallel
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.recomputed import recompute

DEVICE = torch.device("second", 0)


class Peak(TorchDispatchMode):
    """Meter of storage bytes on the device, now and at peak, reread each time as FSDP2 resizes storages."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        seen = [self.see(each) for each in tree_leaves(result)]  # every one
        if any(seen):
            self.most = max(self.most, self.now)
        return result

    def see(self, thing: Any) -> bool:
        if isinstance(thing, torch.Tensor) and thing.device.type == DEVICE.type:
            storage = (thing.to_local() if isinstance(thing, DTensor) else thing).untyped_storage()
            key = storage._cdata
            if key not in self._storages:
                self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
                return True
        return False

    @property
    def now(self) -> int:
        alive = [reference() for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    if torch.is_autocast_enabled(DEVICE.type):  # which takes them to its type before the kernel
        query, key, value = (each.to(torch.bfloat16) for each in (query, key, value))
    return _Fused.apply(query, key, value)  # type: ignore[no-any-return]


def peak_of_step(config: Any, spec: Spec, num_tokens: int, *, again: bool) -> int:
    """Return the peak of the second step, with two micro-batches; of several ranks, rank 0's."""
    dtype, trainer = getattr(torch, spec.model.dtype), spec.roles.trainer
    ranks = Ranks(num_ranks=trainer.ranks)
    with ExitStack() as leaving:
        patch = leaving.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(packed, "_sdpa", _fused)
        patch.setattr(lean, "_is_gated", lambda _: True)  # fake tensors have no bits
        if ranks.num_ranks > 1:
            ranks = leaving.enter_context(_others(ranks, trainer.tensor_parallel, patch))
        leaving.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with DEVICE:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        forward = TorchForward(_prepared(model), 1.0)
        tensor_parallel.cut(model, ranks.tensor, field="model")
        if again:
            recompute(forward.parts.trunk)
        computes_in = torch.bfloat16 if spec.training.autocast == "bfloat16" else torch.float32
        sharding.shard(forward, forward.parts.trunk, DEVICE, ranks, computes_in=computes_in, widens=False)
        optimizer = make_optimizer(model.parameters(), spec.training.optimizer, field="optimizer")
        quarter = num_tokens // 4
        row = packed.pack_sequences([[1] * quarter], [[2] * (num_tokens - quarter + 1)]).to(DEVICE)
        gc.collect()
        peak = Peak()
        for parameter in model.parameters():
            peak.see(parameter)
        with peak:
            for num_micro_batches in (1, 2):
                peak.most = peak.now
                for _ in range(num_micro_batches):
                    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=spec.training.autocast == "bfloat16"):
                        found = forward(row)
                    (-found.log_probs.mean()).backward()
                    del found
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return peak.most


@contextmanager
def _others(ranks: Ranks, parts: int, patch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Yield a group whose other ranks do not exist, with a readable mesh."""
    dist.init_process_group("fake", rank=0, world_size=ranks.num_ranks, store=FakeStore())
    try:
        if parts == 1:
            mesh = init_device_mesh(DEVICE.type, (ranks.num_ranks,))
        else:
            columns, row = list(range(0, ranks.num_ranks, parts)), list(range(parts))
            data, tensor = (Ranks(num_ranks=len(of), device=dist.new_group(of)) for of in (columns, row))
            mesh = DeviceMesh.from_group(data.device, DEVICE.type)
            ranks = replace(ranks, data=data, tensor=tensor)
        patch.setattr(sharding, "_mesh", lambda *_: mesh)
        patch.setattr(sharding, "_take", lambda *_: None)  # all is there
        yield ranks
    finally:
        dist.destroy_process_group()


def _prepared(model: Any) -> Any:
    text = model.config
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    paths = [name for name, module in model.named_modules() if hasattr(module, "q_proj")]
    specs = tuple(
        AttentionSpec(
            index=index, path=path, num_heads=text.num_attention_heads, num_kv_heads=text.num_key_value_heads,
            key_dim=size, value_dim=size, scale=size**-0.5, softcap=0.0, has_sinks=False, window=None, chunk=None,
        )
        for index, path in enumerate(paths)
    )  # fmt: skip
    for spec in specs:
        packed.keep_spec(model.get_submodule(spec.path), spec)
    keep_anatomy(model, Anatomy(
        trunk=model.base_model_prefix, trunk_output=BaseModelOutputWithPast, attentions=specs, width=text.hidden_size,
        vocab_size=text.vocab_size, called=frozenset(),
    ))  # fmt: skip
    AttentionInterface.register("rlhfspec_packed", packed.attend)
    model.set_attn_implementation("rlhfspec_packed")
    lean.keep_less(model)
    return model.eval()
