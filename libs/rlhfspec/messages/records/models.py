"""Reports on models and drafters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """Result of checking a loaded model against Hugging Face, kept in the run's manifest."""

    model: str  # class name
    path: str  # "native": all layers in one call; "layers": Hugging Face code over engine kernels. For the trainer,
    # "packed": Hugging Face code over packed rows; "exact": the same over engine kernels
    attentions: tuple[str, ...]  # kinds of attention, without duplicates
    guarded: tuple[str, ...]  # module types that run so that each row's bits are independent of the batch
    probes: tuple[str, ...]
    difference: float  # largest difference of the probes' logits to Hugging Face's, relative to the largest logit
    noise: float  # effect of rounding alone on Hugging Face's logits, likewise
    bits: str  # guarantee about bitwise equality
    attention_split: int | None  # positions per softmax; None: torch's attention
    seconds: float
    dtype: str = ""  # of the weights, and of the computation if it differs; "" in older releases
    prefill: str = ""  # the prefill kernel on a device, and why it is not FlashAttention; "" on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Result of drafting with one drafter since its engine started."""

    drafter: str
    acceptance: tuple[float, ...]  # share of verified best drafts, at depth 1, 2, and deeper
    level_share: float | None  # cost of one more level, over that of a verification; None: it drafts in one go
    num_verifications: int
    num_tokens: int  # that these verifications gave
    saved_seconds: float  # compared with plain decoding; an estimate

    @property
    def tokens_per_verification(self) -> float:
        return self.num_tokens / max(self.num_verifications, 1)
