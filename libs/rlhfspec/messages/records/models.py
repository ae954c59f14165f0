"""How the models that a worker loaded were found right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """How a model was found right; kept in a run's manifest."""

    model: str  # its class
    path: str  # "native": all layers in one call; "layers": Hugging Face's own code over our kernels; the trainer's:
    # "packed": Hugging Face's own code over packed rows; "exact": the same over the engine's kernels
    attentions: tuple[str, ...]  # what they do, each kind once
    guarded: tuple[str, ...]  # kinds of modules whose torch functions are run so that a row's bits are its own
    probes: tuple[str, ...]
    difference: float  # the largest, of the probes' logits to Hugging Face's, in parts of the largest logit
    noise: float  # how far rounding alone moves Hugging Face's, likewise
    bits: str  # what is promised of them
    attention_split: int | None  # positions that have a softmax of their own; None: torch's attention
    seconds: float
    dtype: str = (
        ""  # of its weights, and of what is computed with them where that is another; of an earlier release: ""
    )
    prefill: str = ""  # what runs a prompt's chunks on a device, and why it is not FlashAttention; of a CPU: ""
