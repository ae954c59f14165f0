"""Import of `module:function`. Files beside the job precede installed modules."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhfspec.errors import InvalidRequest, did_you_mean
from rlhfspec.job.rewards import BUILT_IN_FUNCTIONS
from rlhfspec.training.scoring.rewards.user_code import in_daemon_thread

IMPORT_SECONDS = 300.0  # reward code may import large libraries, and a busy node is ten times slower
WARN_AFTER_SECONDS = 5.0  # until a pending import is logged
SLOW_SECONDS = 1.0  # slower imports are logged
log = logging.getLogger(__name__)


def load_function(reference: str, base_folder: Path, *, field: str) -> Callable[..., Any]:
    """Return the function, or raise InvalidRequest with a suggestion."""
    module_name, colon, name = BUILT_IN_FUNCTIONS.get(reference, reference).partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise InvalidRequest(field, reference, "must be module:function")
    module = _module(module_name, base_folder, reference, field)
    if not hasattr(module, name):
        hint = did_you_mean(name, [entry for entry in vars(module) if not entry.startswith("_")])
        raise InvalidRequest(field, reference, f"module {module_name!r} has no {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise InvalidRequest(field, reference, f"{name!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _module(name: str, base_folder: Path, reference: str, field: str) -> ModuleType:
    """Import user code in a thread with a deadline. Its errors become InvalidRequest."""
    began = time.monotonic()
    future = in_daemon_thread(lambda: _import(name, base_folder.absolute()))
    if not wait([future], timeout=min(WARN_AFTER_SECONDS, IMPORT_SECONDS)).done:
        log.warning("%s: still importing %r; it may take %g s", field, name, IMPORT_SECONDS)
    try:
        outcome = future.result(timeout=max(0.0, IMPORT_SECONDS - WARN_AFTER_SECONDS))
    except TimeoutError:
        problem = f"importing {name!r} took longer than {IMPORT_SECONDS:g} s"
        raise InvalidRequest(field, reference, problem) from None
    error = outcome.error
    if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{name}.".startswith(f"{error.name}."):
        raise InvalidRequest(field, reference, _not_found(name, base_folder)) from error
    if error is not None:
        problem = f"importing {name!r} raised {type(error).__name__}: {error}"
        raise InvalidRequest(field, reference, problem) from error
    assert isinstance(outcome.value, ModuleType)
    if (seconds := time.monotonic() - began) >= SLOW_SECONDS:
        log.warning("%s: importing %r took %.1f s", field, name, seconds)
    return outcome.value


def _not_found(name: str, base_folder: Path) -> str:
    hint = did_you_mean(name, [path.stem for path in base_folder.glob("*.py")])
    return f"no module {name!r} beside the job file (in {base_folder}) or installed{hint}"


def _import(name: str, base_folder: Path) -> ModuleType:
    path = base_folder / f"{name}.py"
    with _found_first(base_folder):
        return _import_file(name, path) if path.is_file() else importlib.import_module(name)


def _import_file(name: str, path: Path) -> ModuleType:
    """Import a file under a private name that no other module can have."""
    fingerprint = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    private = f"_rlhfspec_job_{fingerprint}_{name}"
    if private in sys.modules:
        return sys.modules[private]
    spec = importlib.util.spec_from_file_location(private, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with ExitStack() as undo:
        sys.modules[private] = module  # dataclasses and pickle look a module up by its name
        undo.callback(sys.modules.pop, private)
        spec.loader.exec_module(module)
        undo.pop_all()
    return module


@contextmanager
def _found_first(folder: Path) -> Iterator[None]:
    """Put the job's folder first on the path for imports between its modules."""
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
