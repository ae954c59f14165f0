"""Verdicts for sweep tests: invented ones, a crash, a hang."""

import os
import time

from rlhfspec.sweep.run import Case
from rlhfspec.sweep.verdict import Verdict


def made_up(case: Case) -> Verdict:
    if case.variant == "dies":
        os._exit(9)
    if case.variant == "hangs":
        time.sleep(3600)
    return Verdict("refused", f"{case.model_type} {case.variant}".strip())
