"""Loading of Hugging Face models. `load_stored` maps safetensors, which processes of a machine share."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from rlhfspec.common.context import holding
from rlhfspec.errors import InvalidRequest, first_line
from rlhfspec.huggingface.fused.widened import widen
from rlhfspec.huggingface.structure.trace import FORWARD_ERRORS

# Ignored: masks and angles saved by old versions of transformers, layers that predict further tokens.
_SPARE = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$|position_ids$|(^|\.)mtp\.")
LOAD_ERRORS = (*FORWARD_ERRORS, OSError, EOFError, ImportError, SafetensorError, UnpicklingError)

NO_MORE_THREADS = "can't start new thread"  # Python's message


def load_model(path: str | Path, *, field: str = "path") -> Any:
    model = load_stored(path, field=field)
    widen(model.parameters())
    return model


def load_stored(path: str | Path, *, field: str = "path", only_trunk: bool = False, num_ranks: int = 1) -> Any:
    """Load a causal LM on the CPU. bfloat16 parameters stay bfloat16, all others become float32.

    Checkpoints with missing or unknown weights are refused. `only_trunk`: allow any head or none. `num_ranks`: each
    process reads only its part (`cutting.load_part`).
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    loader: Any = AutoModelForCausalLM
    try:
        with _no_report_of_its_own(), _in_types_of_the_file() as buffers:
            model, info = loader.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
                distributed_config=DistributedConfig(tp_size=num_ranks) if num_ranks > 1 else None,
            )  # fmt: skip
    except LOAD_ERRORS as error:
        if isinstance(error, InvalidRequest):
            raise
        if str(error) == NO_MORE_THREADS:  # a limit of the system
            raise OSError(errno.EAGAIN, NO_MORE_THREADS) from error
        exists = Path(path).exists()
        reason = "not a loadable Hugging Face causal LM" if exists else "no such folder, and the model cannot be loaded"
        raise InvalidRequest(field, str(path), f"{reason}: {first_line(error)}") from error
    trunk = f"{model.base_model_prefix}." if only_trunk else ""
    refuse_other_weights(
        (name for name in info["missing_keys"] if name.startswith(trunk)),
        (name for name in info["unexpected_keys"] if name.startswith(trunk) and not _is_spare(name, model.config)),
        (each for each in info["mismatched_keys"] if each[0].startswith(trunk)),
        field=field,
        path=str(path),
    )
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype not in (torch.bfloat16, torch.float32):
            parameter.data = parameter.data.float()
    for name, dtype in buffers.items():
        module, _, leaf = name.rpartition(".")
        held = model.get_submodule(module)._buffers
        held[leaf] = held[leaf].to(dtype)
    return model.eval()


def further_layers(config: Any) -> tuple[int, int]:
    """Return the number of the first layer that predicts further tokens, and how many there are."""
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_mtp_layers", None) or getattr(text, "num_nextn_predict_layers", None) or 0
    return getattr(text, "num_hidden_layers", 0), count


def _is_spare(name: str, config: Any) -> bool:
    first, count = further_layers(config)
    number = re.search(r"\.layers\.(\d+)\.", name)
    return bool(_SPARE.search(name)) or (number is not None and first <= int(number[1]) < first + count)


_buffers_made: ContextVar[dict[str, torch.dtype] | None] = ContextVar("types of buffers of a model that is loaded")


@contextmanager
def _in_types_of_the_file() -> Iterator[dict[str, torch.dtype]]:
    """Load tensors in the file's types, and yield a dict that receives the model's buffer types by name."""
    _let_types_stay()
    made: dict[str, torch.dtype] = {}
    with holding(_buffers_made, made):
        yield made


@cache
def _let_types_stay() -> None:
    """Patch transformers to keep the file's types while `_buffers_made` is set."""
    from transformers import PreTrainedModel

    usual = PreTrainedModel._get_dtype_plan

    def plan(model: Any, dtype: torch.dtype) -> dict[str, Any]:
        made = _buffers_made.get(None)
        if made is None:
            return usual(model, dtype)
        made.update((name, buffer.dtype) for name, buffer in model.named_buffers())
        return {"*": None}  # every name keeps its type

    PreTrainedModel._get_dtype_plan = plan  # type: ignore[method-assign, assignment]


def refuse_other_weights(
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
    *,
    field: str,
    path: str,
) -> None:
    """Raise InvalidRequest if transformers reported missing, unexpected or mismatched weights."""
    lacking, beyond = set(missing), set(unexpected)
    shapes = {f"{name} {_by(found)}, not {_by(wanted)}," for name, found, wanted in mismatched}
    problems = [f"lacks {_named(lacking)}"] if lacking else []
    problems += [f"has {_named(shapes).removesuffix(',')}"] if shapes else []
    problems += [f"has {_named(beyond)} that the model of its config.json does not have"] if beyond else []
    if problems:
        raise InvalidRequest(field, path, f"its checkpoint {', and '.join(problems)}")


def _named(names: Collection[str], most: int = 3) -> str:
    count = f"{len(names)} weight{'' if len(names) == 1 else 's'}"
    return f"{count}: {', '.join([*sorted(names)[:most], *(['...'] if len(names) > most else [])])}"


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


@contextmanager
def _no_report_of_its_own() -> Iterator[None]:
    """Silence transformers' report of missing and unexpected weights."""
    names = ("modeling_utils", "distributed.tensor_parallel")  # the second logs even if the first is silenced
    before = {name: logging.getLogger(f"transformers.{name}").level for name in names}
    for name in names:
        logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(f"transformers.{name}").setLevel(level)
