"""Reward sources of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfspec.job.block import Block, Mark, Natural, Positive, Seconds

BUILT_IN_FUNCTIONS = {"reasoning-gym": "rlhfspec.tiny.reasoning:score"}  # by the name that a job may write


class _Common(Block):
    name: Annotated[str | None, Mark.RESUMABLE] = Field(
        None, description="Name in metrics and messages; null: derived from the source."
    )
    weight: Annotated[float, Field(allow_inf_nan=False)] = Field(
        1.0, description="Weight of this reward in the combination."
    )
    concurrency: Annotated[Positive, Mark.RESUMABLE] = Field(4, description="Maximum number of concurrent calls.")
    timeout_seconds: Annotated[Seconds, Mark.RESUMABLE] = Field(60.0, description="Timeout of one call, in seconds.")
    retries: Annotated[Natural, Mark.RESUMABLE] = Field(
        2, description="Number of retries of a failed call, with growing delays."
    )
    on_error: Literal["fail", "drop"] = Field(
        "fail", description="What happens when all retries fail: fail the job, or drop the sample and log it."
    )


class FunctionSource(_Common):
    type: Literal["function"] = Field(description="Kind of source.")
    function: str = Field(
        description="Function as module:function, or reasoning-gym; modules beside the job file are found first."
    )
    batched: bool = Field(
        False, description="Call the function once per prompt, with lists of prompts, completions and columns."
    )


class ModelSource(_Common):
    type: Literal["model"] = Field(description="Kind of source.")
    path: str = Field(
        min_length=1,
        description="Folder or hub id of a sequence classification model; with several outputs, set label.",
    )
    label: Natural | None = Field(
        None, description="Index of the output that is the reward; null: the model has one output."
    )
    chat_template: bool = Field(
        False, description="Format prompt and response with the model's chat template; false: concatenate them."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Precision of the model; auto: bfloat16 on a GPU, float32 on a CPU."
    )


class HttpSource(_Common):
    type: Literal["http"] = Field(description="Kind of source.")
    url: str = Field(
        pattern=r"^(https?://|\$\{)",
        description="URL that receives a JSON POST; ${NAME} is taken from the environment.",
    )
    headers: Annotated[dict[str, str], Mark.RESUMABLE] = Field(
        {}, description="HTTP headers; ${NAME} is taken from the environment: use it for keys."
    )


RewardSource = Annotated[FunctionSource | ModelSource | HttpSource, Field(discriminator="type")]


class Rewards(Block):
    """The rewards of the job."""

    sources: list[RewardSource] = Field(min_length=1, max_length=32, description="Sources of rewards.")
    combine: Literal["sum", "min", "product"] = Field(
        "sum", description="How the weighted rewards of the sources become one."
    )
