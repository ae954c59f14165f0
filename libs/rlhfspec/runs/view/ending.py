"""How a run's folder is left: how it ended, the pictures, the summary; the traceback of what failed."""

from __future__ import annotations

import traceback
from importlib.util import find_spec

from rlhfspec.job import RLHFJob
from rlhfspec.runs.folder.manifest import RunOutcome
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view.plots import overview
from rlhfspec.runs.view.summary import Summary, summarize


def finish_folder(folder: RunFolder, job: RLHFJob, outcome: RunOutcome, reason: str, *, resume_command: str) -> Summary:
    """Finish the folder and return its summary, with pictures only where matplotlib is installed: a trainer's image may
    do without."""
    folder.finish(outcome, reason)
    steps = folder.steps()
    if steps and find_spec("matplotlib") is not None:
        name, evaluations = job.metadata.name, folder.evaluations()
        overview(steps, folder.plots / "training.png", title=name, evaluations=evaluations)
    return summarize(folder, resume_command=resume_command, num_texts=job.spec.observability.sample_texts)


def kept_traceback(folder: RunFolder, error: BaseException) -> str:
    """Keep the traceback in the folder, and return where it is."""
    failure = folder.path / "failure.txt"
    try:
        failure.write_text("".join(traceback.format_exception(error)))
    except OSError as full:
        return f"{failure} cannot be written: {full.strerror}"
    return f"the whole traceback is in {failure}"
