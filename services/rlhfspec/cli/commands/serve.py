from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine
from rlhfspec.errors import InvalidRequest

if TYPE_CHECKING:
    from rlhfspec.engine.core import Engine

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
Drafter = Annotated[str, typer.Option("--drafter", help="Drafter: off, auto, self, suffix, or a model's folder.")]
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
        try:
            from rlhfspec.common.web import serve as serve_app
        except ModuleNotFoundError as error:
            problem = "needs a package that is not installed: pip install 'rlhfspec[run,serve]'"
            raise InvalidRequest("serve", error.name, problem) from None
        with StatusLine() as status:
            folder = _model_of(policy, status)
            status(f"loading {folder}")
            engine = _engine(folder, dtype, drafter, max_sequences, max_context)
        from rlhfspec.door.calls import EngineThread
        from rlhfspec.door.server import PolicyDoor, variables
        from rlhfspec.door.tools import ToolCalls

        tokenizer = engine.state.tokenizer
        tools = None if tool_parser is None else ToolCalls(tool_parser, tokenizer)

        async def until_a_signal() -> None:
            thread = EngineThread(engine, most_kept=2 * max_sequences)
            try:
                door = PolicyDoor(thread.calls, tokenizer, name=Path(policy).name, tools=tools)
                await serve_app(door.app(), host, port, ready=lambda at: _say(variables(host, at, door.token)))
            finally:
                thread.close()
                engine.close()

        asyncio.run(until_a_signal())


def _model_of(policy: str, status: StatusLine) -> str:
    """Return the folder of the model; of a run, that of its best policy, which is exported if it is not there."""
    from rlhfspec.prepare.tiny_paths import made
    from rlhfspec.runs.folder.choosing import best_or_last
    from rlhfspec.runs.folder.run_folder import RunFolder

    run = RunFolder(Path(policy))
    if not run.job_file.exists():
        return made(policy, status)
    if not run.export.exists() or run.manifest().exported != str(best_or_last(run)):
        from rlhfspec.cli.commands.export import export

        status("exporting the policy of the run")
        export(run.path)
    return str(run.export)


def _engine(folder: str, dtype: str | None, drafter: str, max_sequences: int, max_context: int | None) -> Engine:
    import torch

    from rlhfspec.engine.core import Engine
    from rlhfspec.huggingface.structure.positions import num_positions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_mode = drafter in ("off", "suffix")
    engine = Engine.from_pretrained(
        folder,
        drafter=None if is_mode else drafter,
        speculation=drafter if is_mode else "adaptive",
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        max_sequences=max_sequences,
        max_context=max_context or min(num_positions(folder) or _MOST_CONTEXT, _MOST_CONTEXT),
    )
    if engine.state.tokenizer is None:
        raise InvalidRequest("FOLDER", folder, "has no tokenizer")
    return engine


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        typer.echo(line)
