from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfspec.cli.commands.export import write_policy
from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine
from rlhfspec.errors import InvalidRequest

if TYPE_CHECKING:
    from rlhfspec.engine.core import Engine
    from rlhfspec.runs.folder.run_folder import RunFolder

_MOST_CONTEXT = 4096  # by default: memory for a longer one is better asked for

Policy = Annotated[
    str,
    typer.Argument(metavar="FOLDER", help="Folder of a run or of a model, a hub id, or smollm2.", show_default=False),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free port.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="bfloat16 or float32.  [default: float32 on a CPU, else bfloat16]", show_default=False
    ),
]
Drafter = Annotated[str, typer.Option("--drafter", help="Drafter: off, auto, self, mtp, suffix, or a model's folder.")]
Tools = Annotated[
    str | None,
    typer.Option(
        "--tool-parser", show_default=False,
        help="Format of the model's tool calls: qwen3 (Hermes), qwen3.5, glm or deepseek-v3.  [default: no tools]",
    ),
]  # fmt: skip
Rows = Annotated[int, typer.Option("--max-sequences", min=1, help="Number of responses generated together.")]
Context = Annotated[
    int | None,
    typer.Option(
        "--max-context", min=2, show_default=False,
        help=f"Most tokens of prompt and response.  [default: the model's, at most {_MOST_CONTEXT}]",
    ),
]  # fmt: skip


def serve(
    policy: Policy, host: Host = "127.0.0.1", port: Port = 8000, dtype: Dtype = None,
    drafter: Drafter = "auto", tool_parser: Tools = None, max_sequences: Rows = 32, max_context: Context = None,
) -> None:  # fmt: skip
    """Serve a policy to OpenAI clients: chats and completions with exact token ids. Ctrl-C ends it.

    Clients need the printed token, which is random unless RLHFSPEC_SERVE_TOKEN is set.
    """
    with exit_on_problems():
        refuse_without_packages("serve")
        from rlhfspec.common.web import serve as serve_app
        from rlhfspec.door.tools import ToolCalls, check_parser

        if tool_parser is not None:
            check_parser(tool_parser)
        with StatusLine() as status:
            stored = stored_policy(policy, status)
            status(f"loading {stored.folder}")
            engine = engine_of(
                stored, dtype=dtype, drafter=drafter, max_sequences=max_sequences, max_context=max_context
            )
        if stored.run is not None:
            typer.echo(f"{stored.folder}: {stored.run.manifest().exported}")
        from rlhfspec.door.calls import EngineThread
        from rlhfspec.door.server import PolicyDoor, variables

        tokenizer = engine.state.tokenizer
        tools = None if tool_parser is None else ToolCalls(tool_parser, tokenizer)

        async def until_a_signal() -> None:
            thread = EngineThread(engine, most_kept=2 * max_sequences)
            try:
                door = PolicyDoor(thread.calls, tokenizer, name=Path(policy).name, tools=tools, run=stored.run)
                await serve_app(door.app(), host, port, ready=lambda at: _say(variables(host, at, door.token)))
            finally:
                thread.close()
                engine.close()

        asyncio.run(until_a_signal())


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """Weights to load: a model's folder or hub id, and the run that they come from."""

    folder: str
    version: int = 0  # of the weights, in the run
    run: RunFolder | None = None


def refuse_without_packages(command: str) -> None:
    """Raise InvalidRequest if a package of the extra `serve` is missing."""
    for name in ("aiohttp", "renderers"):
        if find_spec(name) is None:
            problem = "needs a package that is not installed: pip install 'rlhfspec[run,serve]'"
            raise InvalidRequest(command, name, problem)


def stored_policy(policy: str, status: StatusLine) -> StoredPolicy:
    """Return where a policy's weights are; of a run, those of its best policy, which are exported if need be."""
    from rlhfspec.prepare.tiny_paths import made
    from rlhfspec.runs.folder.choosing import best_or_last
    from rlhfspec.runs.folder.run_folder import RunFolder

    run = RunFolder(Path(policy))
    if not run.job_file.exists():
        return StoredPolicy(made(policy, status))
    best = best_or_last(run)
    if not run.export.exists() or run.manifest().exported != str(best):
        write_policy(run, status)
    versions = {metrics.step: metrics.weights_version for metrics in run.steps()}
    return StoredPolicy(str(run.export), versions.get(best.step, best.step), run)


def engine_of(
    stored: StoredPolicy, *, dtype: str | None = None, drafter: str = "auto", max_sequences: int,
    max_context: int | None = None, tokenizer: Any = None,
) -> Engine:  # fmt: skip
    """Load a policy. `tokenizer`: by default the one beside the weights."""
    import torch

    from rlhfspec.engine.core import Engine
    from rlhfspec.huggingface.structure.positions import num_positions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_mode = drafter in ("off", "suffix")
    engine = Engine.from_pretrained(
        stored.folder,
        drafter=None if is_mode else drafter,
        speculation=drafter if is_mode else "adaptive",
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        max_sequences=max_sequences,
        max_context=max_context or min(num_positions(stored.folder) or _MOST_CONTEXT, _MOST_CONTEXT),
    )
    engine.state.weights_version = stored.version
    engine.state.tokenizer = tokenizer or engine.state.tokenizer
    if engine.state.tokenizer is None:
        raise InvalidRequest("FOLDER", stored.folder, "has no tokenizer")
    return engine


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        typer.echo(line)
