"""Generation settings of a job: sampling parameters, engine and speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhfspec.job.block import Block, Mark, Natural, Positive
from rlhfspec.job.choices.drafters import SPECULATION_MODES
from rlhfspec.job.choices.engines import ENGINES

if TYPE_CHECKING:  # a type checker cannot evaluate a Literal of a table's names
    SpeculationMode = str
    EngineName = str
else:
    SpeculationMode = Literal[SPECULATION_MODES]
    EngineName = Literal[ENGINES.names]


class Speculation(Block):
    """Speculative decoding."""

    mode: SpeculationMode = Field(
        "adaptive",
        description="How tokens are drafted; adaptive chooses at every step. Every mode gives the same tokens.",
    )
    learning: Literal["off", "auto", "share"] = Field(
        "off",
        description="Train an EAGLE-3 drafter on verified tokens: auto, while that saves time; share, for a share of "
        "generating time, and while the generator is idle.",
    )
    learning_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.05, description="Share of generating time that learning may take, with learning: share."
    )


class EngineChoice(Block):
    """The generation engine; in a file its bare name is short for a block with that name."""

    name: EngineName = Field("own", description="Generation engine; own is the engine of this project.")
    arguments: dict[str, Any] = Field(
        {}, description="Arguments of the engine, such as quantization for vllm; own takes none."
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class Generation(Block):
    """Sampling parameters, and the engine that generates."""

    engine: EngineChoice = Field(EngineChoice(), description="The generation engine.")
    max_tokens: Positive = Field(256, description="Maximum number of tokens to generate per response.")
    temperature: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = Field(
        1.0, description="Sampling temperature; the log-probs that are trained on are computed with it too."
    )
    top_k: Natural = Field(
        0, description="Sample among the k most likely tokens only; 0: all. The trainer's log-probs ignore this mask."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample among the most likely tokens that sum to this probability only; 1: all tokens."
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Stop strings, besides the EOS token: a response ends at the first, which is cut from its text."
    )
    speculation: Annotated[Speculation, Mark.RESUMABLE] = Field(Speculation(), description="Speculative decoding.")
    ignore_eos: bool = Field(
        False, description="Continue after the EOS token up to maxTokens, for benchmarks with fixed lengths."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Data type of the generation engine's weights; auto: bfloat16 on a GPU, float32 on a CPU."
    )
    exact: Literal["auto", "on", "off"] = Field(
        "auto",
        description="On a GPU, on makes tokens independent of batch and speculation; off and auto are faster, but a "
        "few tokens may differ. CPUs are always exact.",
    )
    max_sequences: Annotated[Positive, Mark.RESUMABLE] = Field(
        64, description="Maximum number of sequences that one generator runs at a time."
    )
    kv_cache_tokens: Annotated[Positive | None, Mark.RESUMABLE] = Field(
        None,
        description="Size of the KV cache in tokens; null: enough for maxSequences full sequences, "
        "on a GPU as much of that as fits.",
    )
    gpu_memory_fraction: Annotated[float, Mark.RESUMABLE] = Field(
        0.85, gt=0, le=1, description="Part of a GPU's memory that a generator may take, weights included."
    )


class Serving(Block):
    """Answers to clients of a run with `--serve`."""

    target_tpot_milliseconds: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = Field(
        None,
        description="Time per output token of answers, in milliseconds, for which samples pause; null: twice that "
        "without samples.",
    )
