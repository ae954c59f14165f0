"""Trained module (policy or critic) with its optimizer, schedule and checkpoint state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhfspec import job
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import StorageError
from rlhfspec.huggingface.cutting import joined
from rlhfspec.training.learning.optim import make_optimizer, make_schedule
from rlhfspec.training.modeling.stored import PartOf, Share, StoredTensor, whole_shape
from rlhfspec.training.modeling.tensor_parallel import shares_of

State = dict[str, Any]
Given = Tensor | StoredTensor | PartOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    grad_norm: float  # before clipping
    learning_rate: float


class Network:
    def __init__(
        self,
        module: nn.Module,
        settings: job.Optimizer,
        training: job.Training,
        *,
        field: str,
        ranks: Ranks | None = None,
    ) -> None:
        self.module = module
        self._group = ranks.tensor if ranks else None  # tensor parallel ranks
        self._shares = shares_of(module) if self._group else {}
        self.num_updates = 0
        self._training = training
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.parameters = list(trained.values())
        self._shares_by_place = [self._shares.get(name) for name in trained]
        self._optimizer = make_optimizer(self.parameters, settings, field=field)
        self._schedule = self._fresh_schedule()

    def grad_norm(self) -> float:
        """Return the norm of all ranks' gradients, non-finite if one of them is."""
        if self._group is None:
            return _norm(self.parameters)
        cut: list[nn.Parameter] = []
        whole: list[nn.Parameter] = []
        for parameter, share in zip(self.parameters, self._shares_by_place, strict=True):
            (whole if share is None else cut).append(parameter)
        return math.hypot(_norm(whole), *self._group.gather(_norm(cut)))

    def update(self, norm: float) -> Update:
        nn.utils.clip_grads_with_norm_(self.parameters, self._training.max_grad_norm, torch.tensor(norm))
        rate = float(self._schedule.get_last_lr()[0])
        self._optimizer.step()
        self._schedule.step()
        self.num_updates += 1
        self.forget_gradients()
        return Update(grad_norm=norm, learning_rate=rate)

    def forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """Return whole weights, tied ones once. Sharded ones are gathered on rank 0's host; others alias the model."""
        return _whole(self.own_weights(), self._group)

    def own_weights(self) -> dict[str, Tensor | PartOf]:
        """Return this rank's weights or shares of them."""
        by_name = self.module.state_dict(keep_vars=True)
        first_names = {id(tensor): name for name, tensor in reversed(by_name.items())}  # tied weights have several
        return {
            name: _part(tensor.detach(), self._shares.get(name))
            for name, tensor in by_name.items()
            if first_names[id(tensor)] == name
        }

    def load_weights(self, weights: Mapping[str, Given]) -> None:
        """Load some or all weights. Raise StorageError for an unknown name or another shape."""
        own = self.module.state_dict()
        for name, tensor in weights.items():
            if name not in own or whole_shape(own[name].shape, self._shares.get(name)) != torch.Size(tensor.shape):
                raise StorageError("checkpoint", f"its weight {name} {list(tensor.shape)} does not fit the job's model")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(_like(own[name], tensor, self._shares.get(name)))

    def optimizer_state(self) -> State:
        """Return this rank's optimizer state by parameter index, sharing the optimizer's memory."""
        state = self._optimizer.state_dict()
        of_parameters = {
            str(place): {name: self._kept(place, value) for name, value in of.items()}
            for place, of in state["state"].items()
        }
        return {"state": of_parameters, "param_groups": state["param_groups"], "num_updates": self.num_updates}

    def load_optimizer_state(self, state: State) -> None:
        self.num_updates = int(state["num_updates"])
        self._schedule = self._fresh_schedule()  # the schedule is a function of the number of updates
        of_parameters = {
            int(place): {name: self._placed(int(place), value) for name, value in of.items()}
            for place, of in state["state"].items()
        }
        rates = [{name: group[name] for name in ("lr", "initial_lr")} for group in self._optimizer.param_groups]
        groups = [dict(group) | rate for group, rate in zip(state["param_groups"], rates, strict=False)]
        if [len(group["params"]) for group in groups] != [len(g["params"]) for g in self._optimizer.param_groups]:
            raise StorageError("checkpoint", "its optimizer state does not fit the job's model")
        self._optimizer.load_state_dict({"state": of_parameters, "param_groups": groups})

    def _kept(self, place: int, value: Any) -> Any:
        is_like_it = isinstance(value, Tensor) and value.shape == self.parameters[place].shape
        return _part(value, self._shares_by_place[place]) if is_like_it else value

    def _placed(self, place: int, value: Any) -> Any:
        """Cut a loaded optimizer value to this rank's share of parameter `place`, because torch's loading does not."""
        parameter, share = self.parameters[place], self._shares_by_place[place]
        if isinstance(value, (Tensor, StoredTensor, PartOf)):
            same = torch.Size(value.shape) == whole_shape(parameter.shape, share)
            return (_like(parameter, value, share) if same else _read(value)).clone()
        return value

    def _fresh_schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        for group in self._optimizer.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        training = self._training
        total = training.steps * training.epochs * training.mini_batches
        schedule = make_schedule(self._optimizer, training.schedule, num_updates=total)
        for _ in range(self.num_updates):
            _step_quietly(schedule)
        return schedule


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _part(tensor: Tensor, share: Share | None) -> Tensor | PartOf:
    return tensor if share is None else PartOf(tensor, share)


def _whole(values: Mapping[str, Any], group: Ranks | None = None) -> dict[str, Any]:
    """Return values with sharded tensors whole on rank 0's host, dropped elsewhere. All ranks must call this."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        tensor, share = (value.tensor, value.share) if isinstance(value, PartOf) else (value, None)
        if isinstance(tensor, DTensor):
            is_first = tensor.device_mesh.get_local_rank() == 0
            tensor = tensor.full_tensor()
            if not is_first:
                continue
            tensor = tensor.cpu()
        if share is not None and group is not None:
            tensor = joined(tensor.cpu().movedim(share.dim, -1), share.size, group).movedim(-1, share.dim).contiguous()
        found[name] = tensor
    return found


def _like(kept: Tensor, given: Given, share: Share | None) -> Tensor:
    if isinstance(given, PartOf):
        return given.tensor
    if isinstance(given, StoredTensor):
        return given.part_for(kept, share)
    if isinstance(given, DTensor):
        return given
    if share is not None:
        given = given.narrow(share.dim, share.start, share.stop - share.start)
    if not isinstance(kept, DTensor):
        return given
    return distribute_tensor(given.contiguous(), kept.device_mesh, kept.placements, src_data_rank=None)


def _read(given: Given) -> Tensor:
    assert not isinstance(given, PartOf), "it has its parameter's shape"
    return given.whole() if isinstance(given, StoredTensor) else given


def _step_quietly(schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Step the schedule without torch's warning, because the optimizer stepped in an earlier process."""
    schedule.optimizer._opt_called = True  # type: ignore[attr-defined]
    schedule.step()
