from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("prompt", "sample", "score", "weights", "demand", "load", "step_report", "heartbeat", "dataset_info", "evaluation_report", "worker_info", "move", "moved", "plan", "draft_weights")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_REPORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DATASET_INFO_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_REPORT_FIELD_NUMBER: _ClassVar[int]
    WORKER_INFO_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    sample: Sample
    score: Score
    weights: Weights
    demand: Demand
    load: Load
    step_report: StepReport
    heartbeat: Heartbeat
    dataset_info: DatasetInfo
    evaluation_report: EvaluationReport
    worker_info: WorkerInfo
    move: Move
    moved: Moved
    plan: Plan
    draft_weights: DraftWeights
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sample: _Optional[_Union[Sample, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., step_report: _Optional[_Union[StepReport, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., dataset_info: _Optional[_Union[DatasetInfo, _Mapping]] = ..., evaluation_report: _Optional[_Union[EvaluationReport, _Mapping]] = ..., worker_info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., draft_weights: _Optional[_Union[DraftWeights, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("id", "job", "step", "prompt", "replica", "text", "token_ids", "columns_json", "seed", "weights_version", "purpose")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    step: int
    prompt: int
    replica: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    columns_json: str
    seed: int
    weights_version: int
    purpose: str
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., step: _Optional[int] = ..., prompt: _Optional[int] = ..., replica: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., columns_json: _Optional[str] = ..., seed: _Optional[int] = ..., weights_version: _Optional[int] = ..., purpose: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("id", "job", "step", "prompt", "replica", "prompt_text", "prompt_token_ids", "columns_json", "text", "token_ids", "log_probs", "tempered_log_probs", "weights_versions", "finish_reason", "error", "num_verifications", "num_drafted", "num_accepted", "strategies", "experts", "seconds", "generator", "purpose")
    class Strategy(_message.Message):
        __slots__ = ("name", "num_steps")
        NAME_FIELD_NUMBER: _ClassVar[int]
        NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
        name: str
        num_steps: int
        def __init__(self, name: _Optional[str] = ..., num_steps: _Optional[int] = ...) -> None: ...
    class Experts(_message.Message):
        __slots__ = ("layer", "rows")
        LAYER_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        layer: str
        rows: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, layer: _Optional[str] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TEMPERED_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    step: int
    prompt: int
    replica: int
    prompt_text: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    columns_json: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    tempered_log_probs: _containers.RepeatedScalarFieldContainer[float]
    weights_versions: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    error: str
    num_verifications: int
    num_drafted: int
    num_accepted: int
    strategies: _containers.RepeatedCompositeFieldContainer[Sample.Strategy]
    experts: _containers.RepeatedCompositeFieldContainer[Sample.Experts]
    seconds: float
    generator: str
    purpose: str
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., step: _Optional[int] = ..., prompt: _Optional[int] = ..., replica: _Optional[int] = ..., prompt_text: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., columns_json: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., tempered_log_probs: _Optional[_Iterable[float]] = ..., weights_versions: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., error: _Optional[str] = ..., num_verifications: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., strategies: _Optional[_Iterable[_Union[Sample.Strategy, _Mapping]]] = ..., experts: _Optional[_Iterable[_Union[Sample.Experts, _Mapping]]] = ..., seconds: _Optional[float] = ..., generator: _Optional[str] = ..., purpose: _Optional[str] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("id", "sample_id", "job", "step", "stage", "values", "components", "weights_version", "error", "seconds", "purpose")
    class Component(_message.Message):
        __slots__ = ("name", "value")
        NAME_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        name: str
        value: float
        def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    id: str
    sample_id: str
    job: str
    step: int
    stage: str
    values: _containers.RepeatedScalarFieldContainer[float]
    components: _containers.RepeatedCompositeFieldContainer[Score.Component]
    weights_version: int
    error: str
    seconds: float
    purpose: str
    def __init__(self, id: _Optional[str] = ..., sample_id: _Optional[str] = ..., job: _Optional[str] = ..., step: _Optional[int] = ..., stage: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ..., components: _Optional[_Iterable[_Union[Score.Component, _Mapping]]] = ..., weights_version: _Optional[int] = ..., error: _Optional[str] = ..., seconds: _Optional[float] = ..., purpose: _Optional[str] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("id", "job", "version", "role", "uri", "digest")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    version: int
    role: str
    uri: str
    digest: str
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., version: _Optional[int] = ..., role: _Optional[str] = ..., uri: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class DraftWeights(_message.Message):
    __slots__ = ("id", "job", "version", "uri", "digest")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    version: int
    uri: str
    digest: str
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., version: _Optional[int] = ..., uri: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class DatasetInfo(_message.Message):
    __slots__ = ("id", "job", "num_prompts", "num_held_out", "last_step", "columns")
    class Column(_message.Message):
        __slots__ = ("name", "missing_at")
        NAME_FIELD_NUMBER: _ClassVar[int]
        MISSING_AT_FIELD_NUMBER: _ClassVar[int]
        name: str
        missing_at: str
        def __init__(self, name: _Optional[str] = ..., missing_at: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    num_prompts: int
    num_held_out: int
    last_step: int
    columns: _containers.RepeatedCompositeFieldContainer[DatasetInfo.Column]
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., num_prompts: _Optional[int] = ..., num_held_out: _Optional[int] = ..., last_step: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[DatasetInfo.Column, _Mapping]]] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("id", "job", "step", "round", "num_prompts")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    step: int
    round: int
    num_prompts: int
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., step: _Optional[int] = ..., round: _Optional[int] = ..., num_prompts: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("id", "job", "generator", "step", "num_running", "num_waiting", "num_finished", "num_tokens", "tokens_per_second", "accepted_per_verification", "strategy", "worker", "incarnation", "host", "weights_version", "is_leaving", "step_seconds", "sequence_seconds", "prefill_seconds", "prefill_tokens", "num_free_rows", "num_free_tokens", "sample_ids", "num_generated", "num_held", "num_prefilled", "num_found", "learning_seconds", "saved_seconds", "drafter_version", "drafting")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLED_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_FIELD_NUMBER: _ClassVar[int]
    LEARNING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    generator: str
    step: int
    num_running: int
    num_waiting: int
    num_finished: int
    num_tokens: int
    tokens_per_second: float
    accepted_per_verification: float
    strategy: str
    worker: int
    incarnation: str
    host: str
    weights_version: int
    is_leaving: bool
    step_seconds: float
    sequence_seconds: float
    prefill_seconds: float
    prefill_tokens: int
    num_free_rows: int
    num_free_tokens: int
    sample_ids: _containers.RepeatedScalarFieldContainer[str]
    num_generated: _containers.RepeatedScalarFieldContainer[int]
    num_held: _containers.RepeatedScalarFieldContainer[int]
    num_prefilled: int
    num_found: int
    learning_seconds: float
    saved_seconds: float
    drafter_version: int
    drafting: _containers.RepeatedCompositeFieldContainer[Drafting]
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., generator: _Optional[str] = ..., step: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., accepted_per_verification: _Optional[float] = ..., strategy: _Optional[str] = ..., worker: _Optional[int] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., weights_version: _Optional[int] = ..., is_leaving: _Optional[bool] = ..., step_seconds: _Optional[float] = ..., sequence_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., prefill_tokens: _Optional[int] = ..., num_free_rows: _Optional[int] = ..., num_free_tokens: _Optional[int] = ..., sample_ids: _Optional[_Iterable[str]] = ..., num_generated: _Optional[_Iterable[int]] = ..., num_held: _Optional[_Iterable[int]] = ..., num_prefilled: _Optional[int] = ..., num_found: _Optional[int] = ..., learning_seconds: _Optional[float] = ..., saved_seconds: _Optional[float] = ..., drafter_version: _Optional[int] = ..., drafting: _Optional[_Iterable[_Union[Drafting, _Mapping]]] = ...) -> None: ...

class Drafting(_message.Message):
    __slots__ = ("drafter", "acceptance", "level_share", "num_verifications", "num_tokens", "saved_seconds")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    acceptance: _containers.RepeatedScalarFieldContainer[float]
    level_share: float
    num_verifications: int
    num_tokens: int
    saved_seconds: float
    def __init__(self, drafter: _Optional[str] = ..., acceptance: _Optional[_Iterable[float]] = ..., level_share: _Optional[float] = ..., num_verifications: _Optional[int] = ..., num_tokens: _Optional[int] = ..., saved_seconds: _Optional[float] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("id", "job", "sample_id", "source", "destination", "gain_seconds", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    GAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    sample_id: str
    source: int
    destination: int
    gain_seconds: float
    reason: str
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., sample_id: _Optional[str] = ..., source: _Optional[int] = ..., destination: _Optional[int] = ..., gain_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("id", "job", "sample_id", "source", "destination", "how", "reason", "code", "num_bytes", "num_rounds", "num_tokens", "num_recomputed", "pause_seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    sample_id: str
    source: int
    destination: int
    how: str
    reason: str
    code: str
    num_bytes: int
    num_rounds: int
    num_tokens: int
    num_recomputed: int
    pause_seconds: float
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., sample_id: _Optional[str] = ..., source: _Optional[int] = ..., destination: _Optional[int] = ..., how: _Optional[str] = ..., reason: _Optional[str] = ..., code: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_rounds: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_recomputed: _Optional[int] = ..., pause_seconds: _Optional[float] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("id", "job", "num_wanted", "why_wanted", "ends", "num_generators", "num_samples", "latest_end", "latest_end_after", "moves", "why_not", "dry")
    class End(_message.Message):
        __slots__ = ("generator", "seconds")
        GENERATOR_FIELD_NUMBER: _ClassVar[int]
        SECONDS_FIELD_NUMBER: _ClassVar[int]
        generator: int
        seconds: float
        def __init__(self, generator: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
    class PlannedMove(_message.Message):
        __slots__ = ("id", "sample", "source", "destination", "gain_seconds", "reason")
        ID_FIELD_NUMBER: _ClassVar[int]
        SAMPLE_FIELD_NUMBER: _ClassVar[int]
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        DESTINATION_FIELD_NUMBER: _ClassVar[int]
        GAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        id: str
        sample: str
        source: int
        destination: int
        gain_seconds: float
        reason: str
        def __init__(self, id: _Optional[str] = ..., sample: _Optional[str] = ..., source: _Optional[int] = ..., destination: _Optional[int] = ..., gain_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...
    class Dry(_message.Message):
        __slots__ = ("generator", "doing")
        GENERATOR_FIELD_NUMBER: _ClassVar[int]
        DOING_FIELD_NUMBER: _ClassVar[int]
        generator: int
        doing: str
        def __init__(self, generator: _Optional[int] = ..., doing: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    WHY_WANTED_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATORS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LATEST_END_FIELD_NUMBER: _ClassVar[int]
    LATEST_END_AFTER_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    DRY_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    num_wanted: int
    why_wanted: str
    ends: _containers.RepeatedCompositeFieldContainer[Plan.End]
    num_generators: int
    num_samples: int
    latest_end: float
    latest_end_after: float
    moves: _containers.RepeatedCompositeFieldContainer[Plan.PlannedMove]
    why_not: _containers.RepeatedScalarFieldContainer[str]
    dry: _containers.RepeatedCompositeFieldContainer[Plan.Dry]
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., num_wanted: _Optional[int] = ..., why_wanted: _Optional[str] = ..., ends: _Optional[_Iterable[_Union[Plan.End, _Mapping]]] = ..., num_generators: _Optional[int] = ..., num_samples: _Optional[int] = ..., latest_end: _Optional[float] = ..., latest_end_after: _Optional[float] = ..., moves: _Optional[_Iterable[_Union[Plan.PlannedMove, _Mapping]]] = ..., why_not: _Optional[_Iterable[str]] = ..., dry: _Optional[_Iterable[_Union[Plan.Dry, _Mapping]]] = ...) -> None: ...

class Number(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class Spread(_message.Message):
    __slots__ = ("mean", "std", "min", "max")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    mean: float
    std: float
    min: float
    max: float
    def __init__(self, mean: _Optional[float] = ..., std: _Optional[float] = ..., min: _Optional[float] = ..., max: _Optional[float] = ...) -> None: ...

class Lengths(_message.Message):
    __slots__ = ("mean", "min", "p50", "p95", "max", "edges", "histogram")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    mean: float
    min: int
    p50: int
    p95: int
    max: int
    edges: _containers.RepeatedScalarFieldContainer[int]
    histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, mean: _Optional[float] = ..., min: _Optional[int] = ..., p50: _Optional[int] = ..., p95: _Optional[int] = ..., max: _Optional[int] = ..., edges: _Optional[_Iterable[int]] = ..., histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class StepMetrics(_message.Message):
    __slots__ = ("step", "weights_version", "weights_digest", "num_samples", "num_dropped", "num_prompts", "equal_reward_groups", "reward", "reward_components", "advantage", "kl", "policy_loss", "value_loss", "kl_loss", "entropy", "clip_fraction", "explained_variance", "grad_norm", "learning_rate", "learning", "response_length", "truncated_fraction", "num_response_tokens", "tokens_per_second", "accepted_per_verification", "strategy", "reward_by_column", "num_by_column", "expert_rows", "log_prob_difference", "staleness_max", "seconds", "started_unix_seconds", "finished_unix_seconds")
    class Strategy(_message.Message):
        __slots__ = ("name", "count")
        NAME_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        name: str
        count: int
        def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
    class Experts(_message.Message):
        __slots__ = ("layer", "rows")
        LAYER_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        layer: str
        rows: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, layer: _Optional[str] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...
    class LogProbDifference(_message.Message):
        __slots__ = ("max", "mean")
        MAX_FIELD_NUMBER: _ClassVar[int]
        MEAN_FIELD_NUMBER: _ClassVar[int]
        max: float
        mean: float
        def __init__(self, max: _Optional[float] = ..., mean: _Optional[float] = ...) -> None: ...
    class Seconds(_message.Message):
        __slots__ = ("generation", "reward", "reference", "critic", "training", "checkpoint", "waiting", "step")
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        REWARD_FIELD_NUMBER: _ClassVar[int]
        REFERENCE_FIELD_NUMBER: _ClassVar[int]
        CRITIC_FIELD_NUMBER: _ClassVar[int]
        TRAINING_FIELD_NUMBER: _ClassVar[int]
        CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
        WAITING_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        generation: float
        reward: float
        reference: float
        critic: float
        training: float
        checkpoint: float
        waiting: float
        step: float
        def __init__(self, generation: _Optional[float] = ..., reward: _Optional[float] = ..., reference: _Optional[float] = ..., critic: _Optional[float] = ..., training: _Optional[float] = ..., checkpoint: _Optional[float] = ..., waiting: _Optional[float] = ..., step: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    EQUAL_REWARD_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    POLICY_LOSS_FIELD_NUMBER: _ClassVar[int]
    VALUE_LOSS_FIELD_NUMBER: _ClassVar[int]
    KL_LOSS_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    CLIP_FRACTION_FIELD_NUMBER: _ClassVar[int]
    EXPLAINED_VARIANCE_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    NUM_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    REWARD_BY_COLUMN_FIELD_NUMBER: _ClassVar[int]
    NUM_BY_COLUMN_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    weights_version: int
    weights_digest: str
    num_samples: int
    num_dropped: int
    num_prompts: int
    equal_reward_groups: int
    reward: Spread
    reward_components: _containers.RepeatedCompositeFieldContainer[Number]
    advantage: Spread
    kl: _containers.RepeatedCompositeFieldContainer[Number]
    policy_loss: float
    value_loss: float
    kl_loss: float
    entropy: float
    clip_fraction: float
    explained_variance: float
    grad_norm: float
    learning_rate: float
    learning: _containers.RepeatedCompositeFieldContainer[Number]
    response_length: Lengths
    truncated_fraction: float
    num_response_tokens: int
    tokens_per_second: float
    accepted_per_verification: float
    strategy: _containers.RepeatedCompositeFieldContainer[StepMetrics.Strategy]
    reward_by_column: _containers.RepeatedCompositeFieldContainer[Number]
    num_by_column: _containers.RepeatedCompositeFieldContainer[Number]
    expert_rows: _containers.RepeatedCompositeFieldContainer[StepMetrics.Experts]
    log_prob_difference: StepMetrics.LogProbDifference
    staleness_max: int
    seconds: StepMetrics.Seconds
    started_unix_seconds: float
    finished_unix_seconds: float
    def __init__(self, step: _Optional[int] = ..., weights_version: _Optional[int] = ..., weights_digest: _Optional[str] = ..., num_samples: _Optional[int] = ..., num_dropped: _Optional[int] = ..., num_prompts: _Optional[int] = ..., equal_reward_groups: _Optional[int] = ..., reward: _Optional[_Union[Spread, _Mapping]] = ..., reward_components: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., advantage: _Optional[_Union[Spread, _Mapping]] = ..., kl: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., policy_loss: _Optional[float] = ..., value_loss: _Optional[float] = ..., kl_loss: _Optional[float] = ..., entropy: _Optional[float] = ..., clip_fraction: _Optional[float] = ..., explained_variance: _Optional[float] = ..., grad_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., learning: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., response_length: _Optional[_Union[Lengths, _Mapping]] = ..., truncated_fraction: _Optional[float] = ..., num_response_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., accepted_per_verification: _Optional[float] = ..., strategy: _Optional[_Iterable[_Union[StepMetrics.Strategy, _Mapping]]] = ..., reward_by_column: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., num_by_column: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., expert_rows: _Optional[_Iterable[_Union[StepMetrics.Experts, _Mapping]]] = ..., log_prob_difference: _Optional[_Union[StepMetrics.LogProbDifference, _Mapping]] = ..., staleness_max: _Optional[int] = ..., seconds: _Optional[_Union[StepMetrics.Seconds, _Mapping]] = ..., started_unix_seconds: _Optional[float] = ..., finished_unix_seconds: _Optional[float] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("id", "job", "metrics")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    metrics: StepMetrics
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., metrics: _Optional[_Union[StepMetrics, _Mapping]] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("step", "weights_version", "num_samples", "num_failed", "reward", "reward_components", "response_length", "truncated_fraction", "seconds", "reward_by_column", "num_by_column", "different_answers", "expected_answers")
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REWARD_BY_COLUMN_FIELD_NUMBER: _ClassVar[int]
    NUM_BY_COLUMN_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    weights_version: int
    num_samples: int
    num_failed: int
    reward: Spread
    reward_components: _containers.RepeatedCompositeFieldContainer[Number]
    response_length: Lengths
    truncated_fraction: float
    seconds: float
    reward_by_column: _containers.RepeatedCompositeFieldContainer[Number]
    num_by_column: _containers.RepeatedCompositeFieldContainer[Number]
    different_answers: float
    expected_answers: float
    def __init__(self, step: _Optional[int] = ..., weights_version: _Optional[int] = ..., num_samples: _Optional[int] = ..., num_failed: _Optional[int] = ..., reward: _Optional[_Union[Spread, _Mapping]] = ..., reward_components: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., response_length: _Optional[_Union[Lengths, _Mapping]] = ..., truncated_fraction: _Optional[float] = ..., seconds: _Optional[float] = ..., reward_by_column: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., num_by_column: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., different_answers: _Optional[float] = ..., expected_answers: _Optional[float] = ...) -> None: ...

class EvaluationReport(_message.Message):
    __slots__ = ("id", "job", "evaluation")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    evaluation: Evaluation
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("id", "job", "stage", "worker", "doing", "what", "since_seconds", "overdue_seconds", "busy_seconds", "trouble")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    stage: str
    worker: int
    doing: str
    what: str
    since_seconds: float
    overdue_seconds: float
    busy_seconds: float
    trouble: str
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., stage: _Optional[str] = ..., worker: _Optional[int] = ..., doing: _Optional[str] = ..., what: _Optional[str] = ..., since_seconds: _Optional[float] = ..., overdue_seconds: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., trouble: _Optional[str] = ...) -> None: ...

class ModelReport(_message.Message):
    __slots__ = ("model", "path", "attentions", "guarded", "probes", "difference", "noise", "bits", "attention_split", "seconds", "dtype", "prefill")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ATTENTIONS_FIELD_NUMBER: _ClassVar[int]
    GUARDED_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_SPLIT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    model: str
    path: str
    attentions: _containers.RepeatedScalarFieldContainer[str]
    guarded: _containers.RepeatedScalarFieldContainer[str]
    probes: _containers.RepeatedScalarFieldContainer[str]
    difference: float
    noise: float
    bits: str
    attention_split: int
    seconds: float
    dtype: str
    prefill: str
    def __init__(self, model: _Optional[str] = ..., path: _Optional[str] = ..., attentions: _Optional[_Iterable[str]] = ..., guarded: _Optional[_Iterable[str]] = ..., probes: _Optional[_Iterable[str]] = ..., difference: _Optional[float] = ..., noise: _Optional[float] = ..., bits: _Optional[str] = ..., attention_split: _Optional[int] = ..., seconds: _Optional[float] = ..., dtype: _Optional[str] = ..., prefill: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("id", "job", "stage", "worker", "host", "pid", "grpc_address", "http_address", "moves_address", "models")
    class LoadedModel(_message.Message):
        __slots__ = ("role", "report")
        ROLE_FIELD_NUMBER: _ClassVar[int]
        REPORT_FIELD_NUMBER: _ClassVar[int]
        role: str
        report: ModelReport
        def __init__(self, role: _Optional[str] = ..., report: _Optional[_Union[ModelReport, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MOVES_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    stage: str
    worker: int
    host: str
    pid: int
    grpc_address: str
    http_address: str
    moves_address: str
    models: _containers.RepeatedCompositeFieldContainer[WorkerInfo.LoadedModel]
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., stage: _Optional[str] = ..., worker: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., grpc_address: _Optional[str] = ..., http_address: _Optional[str] = ..., moves_address: _Optional[str] = ..., models: _Optional[_Iterable[_Union[WorkerInfo.LoadedModel, _Mapping]]] = ...) -> None: ...

class MovedPrompt(_message.Message):
    __slots__ = ("record", "headers", "seconds")
    class Header(_message.Message):
        __slots__ = ("name", "value")
        NAME_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        name: str
        value: str
        def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RECORD_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    headers: _containers.RepeatedCompositeFieldContainer[MovedPrompt.Header]
    seconds: float
    def __init__(self, record: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[MovedPrompt.Header, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...
