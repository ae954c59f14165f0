import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from sweep_judges import made_up

from rlhfspec.sweep.run import Case, sweep
from rlhfspec.sweep.verdict import Verdict


def test_a_process_that_dies_or_hangs_is_judged_wrong_and_the_sweep_goes_on() -> None:
    wanted = [Case("one", "dies"), Case("two", ""), Case("three", "hangs"), Case("four", "")]
    found = sweep(wanted, num_workers=1, judge=made_up, longest_seconds=10.0)
    verdicts = {each.case.model_type: each.verdict for each in found}
    assert verdicts["one"] == Verdict("wrong", "the process ended with 9")
    assert re.fullmatch(r"no verdict after \d\d s", verdicts["three"].detail)
    assert [verdict.kind for verdict in verdicts.values()] == ["wrong", "refused", "wrong", "refused"]


def test_a_sweep_closed_early_leaves_no_process() -> None:
    import multiprocessing

    verdicts = sweep([Case("one", ""), Case("two", "hangs")], num_workers=1, judge=made_up)
    assert next(verdicts).case.model_type == "one"
    verdicts.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_the_sweep_even_if_a_library_swallows_it() -> None:
    import multiprocessing

    def wanted() -> Iterator[Case]:
        yield Case("one", "")
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        yield from (Case(f"{number}", "") for number in range(1_000_000))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may have been begun without it
    try:
        with pytest.raises(KeyboardInterrupt):
            list(sweep(wanted(), num_workers=1, judge=made_up))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert multiprocessing.active_children() == []
