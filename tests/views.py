"""The live view, drawn on a terminal of a given size, and tables as they are printed."""

import io
from dataclasses import replace

from rich.console import Console
from run_folders import example_job, example_sample

from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import Load
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.runs.folder.same_job import as_content
from rlhfspec.runs.view.panel import panel
from rlhfspec.runs.view.roster import ProcessState
from rlhfspec.runs.view.view import View


class Hand:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def terminal(width: int = 80, height: int = 24, *, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    return Console(file=file, width=width, height=height, force_terminal=True, color_system=None, _environ={})


def written(console: Console) -> str:
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.encoding)  # type: ignore[attr-defined,no-any-return]


def a_view(console: Console, *, view: str = "auto", steps: int = 60) -> tuple[View, Hand]:
    content = as_content(example_job(steps=steps))
    content["spec"]["observability"]["view"] = view
    hand = Hand()
    return View(RLHFJob.model_validate(content), console, now=hand), hand


def process(stage: str, worker: int, doing: str, what: str, **fields: object) -> ProcessState:
    state = ProcessState(
        stage=stage, worker=worker, pid=41000, doing=doing, what=what, since_seconds=3.0, busy_seconds=0.0  # type: ignore[arg-type]
    )  # fmt: skip
    return replace(state, **fields)  # type: ignore[arg-type]


def load(generator: str = "g0", speed: float = 1834.2, strategy: str = "suffix 1x4") -> Load:
    return Load(
        id="l", job="sums", generator=generator, step=13, num_running=40, num_waiting=3, num_finished=9, num_tokens=99,
        tokens_per_second=speed, accepted_per_verification=2.31, strategy=strategy, worker=int(generator[-1]),
    )  # fmt: skip


def tell(view: View, *loads: Load) -> None:
    newest = {each.worker: each for each in (*view.progress.loads, *loads)}
    view.progress.take_loads([newest[worker] for worker in sorted(newest)])


def a_full_view(console: Console, *, texts: str = "12+34\n=46", strategy: str = "suffix 1x4") -> View:
    view, hand = a_view(console)
    stages = ["prompts", "generator", "reward", "reference", "critic", "trainer"]
    for step in range(1, 13):
        hand.seconds += 4.2
        view.step(replace(example_step(step=step, reward=step / 20), value_loss=0.5))
        view.progress.take_workers(
            [process(name, 0, "working", f"{texts} of {name}", pid=None, busy_seconds=step * 2.0) for name in stages]
        )
    tell(view, load(strategy=strategy))
    view.progress.sample(replace(example_sample(step=13, text=texts * 9), prompt_text=texts))
    return view


def picture(view: View, console: Console) -> list[str]:
    with console.capture() as capture:
        console.print(panel(view.progress, console.size, "stop"))
    return capture.get().splitlines()


def printed(table: object, width: int = 160) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
