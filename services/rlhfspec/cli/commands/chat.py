from __future__ import annotations

import os
import resource
import secrets
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlhfspec.cli.commands.serve import StoredPolicy, engine_of, refuse_without_packages, stored_policy
from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine
from rlhfspec.cli.signals import FAILED
from rlhfspec.errors import InvalidRequest, RLHFSpecError
from rlhfspec.runs.view.text import visible

if TYPE_CHECKING:
    from rlhfspec.cli.talking import Answer, Partner, Talking
    from rlhfspec.engine.core import Engine

_LOOPBACK = "127.0.0.1"
_NOTES = Console(stderr=True, highlight=False)  # all but the answers
_ROWS = 4  # the answer, and earlier conversations whose KV is kept
_CTRL_D = "\x04"
_SEED_BITS = 32
_WIDE = 100  # columns from which answers stand side by side
_FRAME = 4  # columns and lines of a panel that hold no text

Policy = Annotated[
    str,
    typer.Argument(
        metavar="RUN", show_default=False,
        help="Folder of a run or of a model, a hub id, smollm2, or the URL of an OpenAI-compatible server.",
    ),
]  # fmt: skip
Prompt = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Ask once and exit.", show_default=False)]
Only = Annotated[
    str | None,
    typer.Option(
        "--only", show_default=False,
        help="Of a run: first (the policy before training) or latest (its best one).  [default: both]",
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Seed of every answer.  [default: a new one each time]", show_default=False),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, help="0: greedy.  [default: 1]", show_default=False)
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Most tokens of an answer.  [default: no limit]", show_default=False),
]


def chat(
    policy: Policy, prompt: Prompt = None, only: Only = None, seed: Seed = None, temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:  # fmt: skip
    """Talk to a run's policy, before training and after it, in the terminal.

    The keys + and - choose between both answers. The choice goes into RUN/feedback.jsonl, and the conversation goes on
    with the better one. Ctrl-C ends an answer; Ctrl-D leaves. The key of a server is read from OPENAI_API_KEY or
    RLHFSPEC_SERVE_TOKEN.
    """
    with exit_on_problems():
        if only not in (None, "first", "latest"):
            raise InvalidRequest("--only", only, "must be first or latest")
        if prompt is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise InvalidRequest("--prompt", None, "is needed without a terminal")
        refuse_without_packages("chat")
        from rlhfspec.cli.talking import Talking

        given = {"temperature": temperature, "max_tokens": max_tokens}
        with ExitStack() as leaving:
            talking = Talking()
            leaving.callback(talking.close)
            partners = _partners(policy, only, talking, leaving)
            wanted = {name: value for name, value in given.items() if value is not None}
            conversation = Conversation(talking, partners, wanted, seed)
            if prompt is None:
                conversation.go_on()
            elif not all(answer.is_whole for answer in conversation.ask(prompt)):
                raise typer.Exit(FAILED)


def _partners(policy: str, only: str | None, talking: Talking, leaving: ExitStack) -> list[Partner]:
    """Return the policies to talk to, the latest one last. Those of a folder get doors in this process."""
    if policy.startswith(("http://", "https://")):
        key = os.environ.get("OPENAI_API_KEY") or os.environ.get("RLHFSPEC_SERVE_TOKEN", "")
        return [talking.at(policy, key)]
    with StatusLine() as status:
        found = _policies(policy, only, status)
        engines = {}
        for name, (stored, tokenizer) in found.items():
            status(f"loading {stored.folder}")
            engines[name] = engine_of(stored, max_sequences=_ROWS, tokenizer=tokenizer)
            leaving.callback(engines[name].close)
    if len(engines) > 1:
        _NOTES.print(f"two policies in {_memory() / 1e9:.1f} GB of memory; --only latest loads one", style="dim")
    return [_open(name, engine, found[name][0], talking, leaving) for name, engine in engines.items()]


def _policies(policy: str, only: str | None, status: StatusLine) -> dict[str, tuple[StoredPolicy, Any]]:
    """Return each policy's weights by its name, and the tokenizer if it is not beside them."""
    from rlhfspec.runs.folder.run_folder import RunFolder

    run = RunFolder(Path(policy))
    if not run.job_file.exists():
        if only is not None:
            raise InvalidRequest("--only", only, f"needs the folder of a run, which {policy} is not")
        return {Path(policy).name: (stored_policy(policy, status), None)}
    found: dict[str, tuple[StoredPolicy, Any]] = {}
    if only != "latest":
        from rlhfspec.prepare.tiny_paths import with_tiny_paths
        from rlhfspec.training.data import load_tokenizer

        model = with_tiny_paths(run.job(), status).spec.model
        found["first"] = StoredPolicy(model.path, run=run), load_tokenizer(model)
    if only != "first":
        found["latest"] = stored_policy(policy, status), None
    return found


def _open(name: str, engine: Engine, stored: StoredPolicy, talking: Talking, leaving: ExitStack) -> Partner:
    from rlhfspec.cli.talking import Partner
    from rlhfspec.common.web import listen, serving
    from rlhfspec.door.calls import EngineThread
    from rlhfspec.door.server import PolicyDoor

    thread = EngineThread(engine, most_kept=_ROWS)
    leaving.callback(thread.close)
    door = PolicyDoor(thread.calls, engine.state.tokenizer, name=name, run=stored.run)
    server = AsyncExitStack()
    port = talking.wait(server.enter_async_context(serving(door.app(), listen(_LOOPBACK, 0))))
    leaving.callback(lambda: talking.wait(server.aclose()))
    title = name
    if stored.run is not None:
        title += f": {stored.run.manifest().exported}" if name == "latest" else ": before training"
    return Partner(title, f"http://{_LOOPBACK}:{port}", door.token, takes_feedback=stored.run is not None)


def _memory() -> int:
    """Return the bytes that the process holds, on the GPU if there is one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _key(question: str, keys: str) -> str:
    """Ask, and return the first of these keys that is pressed. Raise EOFError at Ctrl-D."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSADRAIN)
    try:
        _NOTES.print(question, style="dim", markup=False)
        while (key := os.read(terminal, 1).decode(errors="replace")) not in tuple(keys):
            if key in ("", _CTRL_D):
                raise EOFError
        return key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class Conversation:
    """Conversation in the terminal with one policy, or with two of which the better answer goes on."""

    def __init__(self, talking: Talking, partners: Sequence[Partner], wanted: dict[str, Any], seed: int | None) -> None:
        """Begin a conversation. `wanted`: fields of every request. `seed`: None draws one for each exchange."""
        self._talking = talking
        self._partners = partners
        self._wanted = wanted
        self._seed = seed
        self._messages: list[dict[str, str]] = []
        self._console = Console(highlight=False)

    def go_on(self) -> None:
        """Talk until the user leaves."""
        import readline  # noqa: F401  # lets `input` edit its line

        _NOTES.print("Ctrl-C ends an answer, Ctrl-D leaves", style="dim")
        with suppress(EOFError, KeyboardInterrupt):
            while True:
                if text := input("\n> ").strip():
                    self._exchange(text)

    def ask(self, text: str) -> list[Answer]:
        """Show the answers to one more message, as they come, and return them."""
        from rlhfspec.cli.talking import Answer

        answers = [Answer(partner) for partner in self._partners]
        said = [*self._messages, {"role": "user", "content": text}]
        seed = secrets.randbits(_SEED_BITS) if self._seed is None else self._seed
        body = {**self._wanted, "messages": said, "seed": seed}
        if len(answers) > 1 and self._console.is_terminal and self._console.width >= _WIDE:
            self._side_by_side(answers, body)
        else:
            self._one_after_another(answers, body)
        return answers

    def _exchange(self, text: str) -> None:
        answers = self.ask(text)
        chosen = self._chosen([answer for answer in answers if not answer.problem])
        if chosen is not None and chosen.text:
            self._messages.append({"role": "user", "content": text})
            self._messages.append({"role": "assistant", "content": chosen.text})

    def _chosen(self, answers: list[Answer]) -> Answer | None:
        """Let the user vote, if the door keeps votes, and return the answer that goes on."""
        if not answers:
            return None
        *others, latest = answers
        if not all(answer.is_whole and answer.partner.takes_feedback for answer in answers):
            return latest
        words = "+ good, - bad" if not others else "+ latest is better, - first is better"
        key = _key(f"{words}, Enter skips", "+-\n")
        if key == "\n":
            return latest
        if not others:
            self._vote(latest, "up" if key == "+" else "down", None)
            return latest
        better, worse = (latest, others[0]) if key == "+" else (others[0], latest)
        self._vote(better, "up", worse)
        self._vote(worse, "down", better)
        return better

    def _vote(self, answer: Answer, vote: str, against: Answer | None) -> None:
        try:
            self._talking.vote(answer, vote, against=against)
        except RLHFSpecError as error:  # the conversation goes on
            _NOTES.print(Text(str(error), "red"))

    def _one_after_another(self, answers: list[Answer], body: dict[str, Any]) -> None:
        for answer in answers:
            if len(answers) > 1:
                self._console.print(Text(answer.partner.title, "bold"))
            with suppress(KeyboardInterrupt):
                self._talking.ask([answer], body, lambda text: self._console.out(visible(text), end=""))
            self._console.out("")
            _NOTES.print(Text(answer.problem or answer.note, "red" if answer.problem else "dim"))

    def _side_by_side(self, answers: list[Answer], body: dict[str, Any]) -> None:
        def growing() -> Table:
            return self._panels(answers, self._console.height - _FRAME)

        with (
            suppress(KeyboardInterrupt),
            Live(get_renderable=growing, console=self._console, transient=True, refresh_per_second=8),
        ):
            self._talking.ask(answers, body, lambda _: None)
        self._console.print(self._panels(answers))

    def _panels(self, answers: list[Answer], most_lines: int | None = None) -> Table:
        """Return the answers beside each other; of each, its last lines if there are more."""
        table = Table.grid(expand=True)
        width = self._console.width // len(answers) - _FRAME
        panels = []
        for answer in answers:
            table.add_column(ratio=1)
            lines = Text(visible(answer.text)).wrap(self._console, width)
            text = Text("\n").join(lines if most_lines is None else lines[-most_lines:])
            note = Text(answer.problem, "red") if answer.problem else Text(answer.note, "dim")
            panels.append(Panel(text, title=Text(answer.partner.title), subtitle=note))
        table.add_row(*panels)
        return table
