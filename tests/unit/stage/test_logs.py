"""Log lines name their subject, are single lines, and contain no secret."""

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from rlhfspec.stage.logs import about, configure
from rlhfspec.stage.threads import ComputeThread

SEED = "SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC4"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMG\nByqGSM49AgEG\n-----END PRIVATE KEY-----"
log = logging.getLogger("rlhfspec.stage")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    with configure(job="sums", run="3f2a91c0", stage="reward", worker=1, stream=stream):
        yield stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_where_and_when(stream: io.StringIO) -> None:
    log.info("scored %d\nsamples", 3)
    [line] = lines(stream)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() is not None
    assert line == {
        "level": "info", "message": "scored 3\nsamples", "logger": "rlhfspec.stage",
        "job": "sums", "run": "3f2a91c0", "stage": "reward", "worker": 1,
    }  # fmt: skip


async def test_log_lines_about_a_sample_name_it_in_every_thread_and_task(stream: io.StringIO) -> None:
    async def one(sample: str) -> None:
        thread = ComputeThread(sample)
        with about(sample):
            await asyncio.sleep(0)
            await thread.in_thread(log.warning, "computed")
            log.warning("done")
        log.warning("later")
        thread.close()

    ids = ["sums/1/0/0", "sums/1/0/1"]
    await asyncio.gather(*map(one, ids))
    said = sorted((line["message"], line.get("sample", "")) for line in lines(stream))
    assert said == [*(("computed", id) for id in ids), *(("done", id) for id in ids), ("later", ""), ("later", "")]


def test_an_error_is_one_line_with_its_reason_and_its_traceback(stream: io.StringIO) -> None:
    try:
        raise KeyError("answer") from ValueError(f"nats://reward:hunter2@host said {SEED}")
    except KeyError:
        log.exception("could not score")
    [line] = lines(stream)
    assert line["error"] == "KeyError: 'answer'"
    assert "ValueError" in line["traceback"]
    assert "hunter2" not in stream.getvalue()
    assert SEED not in stream.getvalue()


@pytest.mark.parametrize(
    ("said", "secret"),
    [
        (f"seed {SEED}", SEED),
        (f"seed='{SEED.replace('SU', 'SA')}'", "SAAIBDPB"),
        ("nats://reward:hunter2@127.0.0.1:4222", "hunter2"),
        ("redis://:hunter2@127.0.0.1:4222/0", "hunter2"),
        ("http://token-hunter2@judge", "hunter2"),
        (PEM, "MIGHAgEAMBMG"),
        (PEM[:50], "MIGHAgEAMBMG"),
        ("{'password': 'hunter2', 'user': 'me'}", "hunter2"),
        ("password=hunter2 refused", "hunter2"),
        ("Authorization: Bearer hunter2", "hunter2"),
    ],
)
def test_no_line_holds_a_secret(stream: io.StringIO, said: str, secret: str) -> None:
    log.warning(said)
    log.warning("it said %s", said)
    assert len(lines(stream)) == 2
    assert secret not in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_text_without_secrets_is_logged_unchanged(stream: io.StringIO) -> None:
    for harmless in ("sums/3/7/1 of rlhf.sums.3f2a.sample", "http://127.0.0.1:80/readyz", "a@b", "SAMPLES OF STEP 3"):
        log.warning(harmless)
        assert lines(stream)[-1]["message"] == harmless


def test_noise_of_libraries_is_left_out_and_warnings_are_lines(stream: io.StringIO) -> None:
    logging.getLogger("asyncio").warning("returning true from eof_received() has no effect when using ssl")
    logging.getLogger("nats.aio.client").info("connected")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("a warning of Python", UserWarning, stacklevel=1)
    [line] = lines(stream)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "a warning of Python" in line["message"]


def test_the_previous_logging_setup_is_restored() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, log.parent.level if log.parent else 0)
    with configure(job="sums", run="3f2a91c0", stage="reward", worker=1, stream=io.StringIO()):
        assert list(root.handlers) != before[0]
    assert (list(root.handlers), root.level, log.parent.level if log.parent else 0) == before
