"""Sweep of cases in several processes. A process that dies or hangs gives the verdict wrong.

Example:
    >>> [case.variant for case in cases(["gpt2"])][:2]
    ['', 'tie_word_embeddings=False']
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

from rlhfspec.errors import first_line
from rlhfspec.sweep.classes import tiny_model, variants
from rlhfspec.sweep.verdict import Verdict, judge

LONGEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    model_type: str
    variant: str  # empty: the type's defaults


@dataclass(frozen=True, slots=True)
class Judged:
    case: Case
    verdict: Verdict
    seconds: float


def cases(model_types: Iterable[str], *, with_variants: bool = True) -> Iterator[Case]:
    for model_type in model_types:
        yield Case(model_type, "")
        if with_variants:
            yield from (Case(model_type, name) for name in _variant_names(model_type) if name)


def _variant_names(model_type: str) -> list[str]:
    try:
        return [name for name, _ in variants(model_type)]
    except Exception:  # the verdict on the plain case reports the error
        return []


def judge_case(case: Case) -> Verdict:
    try:
        config = dict(variants(case.model_type))[case.variant]()
        tiny_model(config)
    except Exception as error:  # transformers raises errors of any type
        return Verdict("not made", f"{type(error).__name__}: {first_line(error)}")
    return judge(lambda: tiny_model(config))


Judge = Callable[[Case], Verdict]


def sweep(
    wanted: Iterable[Case], *, num_workers: int, judge: Judge = judge_case, longest_seconds: float = LONGEST_SECONDS
) -> Iterator[Judged]:
    """Yield verdicts as they come. A case may take `longest_seconds`, not counting its process's start."""
    waiting = iter(wanted)
    workers = [_Worker(judge, longest_seconds) for _ in range(num_workers)]
    try:
        with _interrupted() as interrupted:
            busy = {worker for worker in workers if worker.take(next(waiting, None))}
            while busy and not interrupted.is_set():
                connection.wait([worker.pipe for worker in busy], timeout=1.0)
                for worker in list(busy):
                    if judged := worker.result():
                        yield judged
                        if not worker.take(next(waiting, None)):
                            busy.remove(worker)
        if interrupted.is_set():
            raise KeyboardInterrupt
    finally:
        for worker in workers:
            worker.end()


@contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Yield an event set by Ctrl-C, because libraries may swallow a KeyboardInterrupt."""
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield asked
        return
    signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class _Worker:
    def __init__(self, judge: Judge, longest_seconds: float) -> None:
        self.judge = judge
        self.longest_seconds = longest_seconds
        self._start()
        self.case: Case | None = None
        self.began = 0.0

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.judge), daemon=True)
        self.process.start()
        theirs.close()
        self.has_started = False

    def take(self, case: Case | None) -> bool:
        self.case, self.began = case, time.monotonic()
        if case is not None:
            self.pipe.send(case)
        return case is not None

    def result(self) -> Judged | None:
        """Return the case's verdict, or None if there is none yet; a dead or late process is replaced."""
        assert self.case is not None
        seconds = time.monotonic() - self.began
        if self.pipe.poll():
            try:
                if (verdict := self.pipe.recv()) is not None:
                    return Judged(self.case, verdict, seconds)
                self.has_started, self.began = True, time.monotonic()
                return None
            except (EOFError, ConnectionError):
                self.process.join()
                problem = f"the process ended with {self.process.exitcode}"
        elif seconds > (self.longest_seconds if self.has_started else LONGEST_SECONDS):
            problem = f"no verdict after {seconds:.0f} s"
        else:
            return None
        self.end()
        self._start()
        return Judged(self.case, Verdict("wrong", problem), seconds)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Any, judge: Judge) -> None:
    import transformers

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    pipe.send(None)  # starts the time of the first case
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(judge(case))
