"""Optimizers and schedules of a job: torch classes or a user's `module:Class`."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic.alias_generators import to_camel
from torch.optim import lr_scheduler

from rlhfspec import job
from rlhfspec.errors import InvalidRequest, did_you_mean

_REFUSED_CLASSES = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "there are no sparse gradients",
    "ReduceLROnPlateau": "it needs a metric to watch, and those of a step are too noisy",
}


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: job.Optimizer, *, field: str
) -> torch.optim.Optimizer:
    """Return an optimizer of the trainable parameters, fused where supported."""
    known = _class(settings.name, torch.optim, torch.optim.Optimizer, f"{field}.name")
    arguments = dict(settings.arguments)
    if "lr" in arguments:
        raise InvalidRequest(f"{field}.arguments", settings.arguments, f"lr must be set in {field}.learningRate")
    if settings.name in ("Adam", "AdamW", "SGD", "Adagrad"):
        arguments = {"fused": not {"fused", "foreach", "differentiable"} & set(arguments)} | arguments
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        return known(trained, lr=settings.learning_rate, **arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{field}.arguments", settings.arguments, f"{settings.name} refuses: {error}") from error


def make_schedule(
    optimizer: torch.optim.Optimizer, settings: job.Schedule, *, num_updates: int
) -> lr_scheduler.LRScheduler:
    """Return a schedule to step once per optimizer step, `num_updates` times in all."""
    field = "spec.training.schedule"
    if settings.name in _SHAPES:
        if settings.arguments:
            raise InvalidRequest(f"{field}.arguments", settings.arguments, f"{settings.name} takes none")
        return lr_scheduler.LambdaLR(optimizer, _warmed_up(_SHAPES[settings.name], settings.warmup_steps, num_updates))
    known = _class(settings.name, lr_scheduler, lr_scheduler.LRScheduler, f"{field}.name", also=tuple(_SHAPES))
    if settings.warmup_steps:
        problem = f"must be 0 with {settings.name}: only {', '.join(_SHAPES)} warm up"
        raise InvalidRequest(f"{field}.warmupSteps", settings.warmup_steps, problem)
    try:
        return known(optimizer, **settings.arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{field}.arguments", settings.arguments, f"{settings.name} refuses: {error}") from error


def check_settings(training: job.Training) -> None:
    """Raise InvalidRequest if an optimizer or schedule cannot be made from its settings."""
    for name in ("optimizer", "critic_optimizer"):
        parameters = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))]
        optimizer = make_optimizer(parameters, getattr(training, name), field=f"spec.training.{to_camel(name)}")
        make_schedule(optimizer, training.schedule, num_updates=training.steps)


# Learning-rate factor by progress after warm-up, in [0, 1). A factor of 0 would come one update past the end.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def _warmed_up(shape: Callable[[float], float], warmup: int, total: int) -> Callable[[int], float]:
    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        return shape(min(1.0, (update - warmup) / max(1, total - warmup)))

    return factor


def _class(name: str, home: Any, kind: type, field: str, also: tuple[str, ...] = ()) -> Any:
    if name in _REFUSED_CLASSES:
        raise InvalidRequest(field, name, f"does not fit: {_REFUSED_CLASSES[name]}")
    module_name, separator, class_name = name.rpartition(":")
    if separator:
        try:
            home = importlib.import_module(module_name)
        except ImportError as error:
            raise InvalidRequest(field, name, f"cannot import {module_name}: {error}") from error
    found = getattr(home, class_name, None)
    if inspect.isclass(found) and issubclass(found, kind) and found is not kind:
        return found
    names = [each for each, thing in vars(home).items() if inspect.isclass(thing) and issubclass(thing, kind)]
    hint = did_you_mean(class_name, (*names, *also))
    raise InvalidRequest(field, name, f"no {kind.__name__} of this name in {home.__name__}{hint}")
