"""Where the rewards of a job come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfspec.job_block import Block, Mark, Natural, Positive, Seconds


class FunctionReward(Block):
    type: Literal["function"]
    function: str = Field(description="module:function; modules are found beside the job file too.")
    batched: bool = Field(
        False, description="true: called once a prompt group with lists (prompts, completions, columns)."
    )


class ModelReward(Block):
    type: Literal["model"]
    path: str = Field(min_length=1, description="A Hugging Face sequence-classification model; one output, or label.")
    label: Natural | None = Field(None, description="Which output counts; null: the model has one.")
    chat_template: bool = Field(
        False, description="true: one exchange in the model's chat template; false: prompt followed by response."
    )


class HttpReward(Block):
    type: Literal["http"]
    url: str = Field(
        pattern=r"^(https?://|\$\{)", description="Receives a JSON POST; ${NAME} is taken from the environment."
    )
    headers: Annotated[dict[str, str], Mark.RESUMABLE] = Field(
        {}, description="Sent along. ${NAME} is taken from the environment: write keys so."
    )


class _Common(Block):
    name: Annotated[str | None, Mark.RESUMABLE] = Field(
        None, description="In metrics and messages; null: derived from the source."
    )
    weight: Annotated[float, Field(allow_inf_nan=False)] = Field(1.0, description="Factor in the combination.")
    concurrency: Annotated[Positive, Mark.RESUMABLE] = Field(4, description="Calls at a time.")
    timeout_seconds: Annotated[Seconds, Mark.RESUMABLE] = Field(60.0, description="Of one call.")
    retries: Annotated[Natural, Mark.RESUMABLE] = Field(2, description="After a failed call, with growing delays.")
    on_error: Literal["fail", "drop"] = Field(
        "fail", description="When retries are used up: end the job, or leave the sample out and say so."
    )


class FunctionSource(FunctionReward, _Common):
    pass


class ModelSource(ModelReward, _Common):
    pass


class HttpSource(HttpReward, _Common):
    pass


RewardSource = Annotated[FunctionSource | ModelSource | HttpSource, Field(discriminator="type")]


class Rewards(Block):
    sources: list[RewardSource] = Field(min_length=1, max_length=32, description="Where rewards come from.")
    combine: Literal["sum", "min", "product"] = Field("sum", description="Of weighted sources.")
