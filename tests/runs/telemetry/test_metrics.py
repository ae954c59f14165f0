"""Every metric in chart, dashboards, rules and documents is served with a value; broker losses are counted."""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from advice import Adviser
from faults.processes import named, slowed
from helm import CHART
from runs import write_data, write_job
from scraping import OF_LEARNING, TARGET, Scrape, Scraper, family, named_anywhere, names_of, values_of
from started import PATIENCE_SECONDS, Started, caught, eventually

from rlhfspec.telemetry.folder import read_spans
from rlhfspec.telemetry.read import Life, lives
from rlhfspec.telemetry.spans import Span

pytestmark = pytest.mark.timeout(400)  # one run for all
ALERTS = CHART / "files" / "alerts.yaml"
BROKER_AWAY = "RLHFBrokerAway"
LOSSES = 6
STILL_SECONDS, MOMENT_SECONDS = 0.3, 0.03
AT_A_TIME = 4
MANY = AT_A_TIME + 2  # samples: those that ran end in the same step, and perhaps their ends were not told
# The reward waits in each step until the test lets it go on.
HELD = """
import pathlib, time

beside = pathlib.Path(__file__).parent
steps = beside / "run" / "steps.jsonl"

def letters(completion):
    trained = steps.read_text().count("\\n") if steps.exists() else 0
    while not (beside / f"go-on-{trained}").exists():
        time.sleep(0.05)
    return sum(character.isascii() and character.isalpha() for character in completion) / 8
"""
SETTINGS = (
    "roles.generator.workers=2",
    "generation.speculation.mode=suffix",
    "generation.maxTokens=448",
    "generation.ignoreEos=true",
    "generation.kvCacheTokens=65536",
    f"generation.maxSequences={AT_A_TIME}",  # else all end together, and all that was told of may be over
    "training.promptsPerStep=12",
    "training.steps=2",
    "failurePolicy.backoffSeconds=0.1",
    "failurePolicy.maxBackoffSeconds=0.2",
)


def rule(name: str) -> dict[str, Any]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return next(each for group in groups for each in group["rules"] if each["alert"] == name)


@dataclass(frozen=True)
class Watched:
    """A completed run with the metrics served before and after each loss of NATS and of Redis."""

    folder: Path
    killed: int  # the generator that was
    scrapes: Sequence[Scrape]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    write_data(folder)
    (folder / "rewards.py").write_text(HELD)
    job = yaml.safe_load((job_file := write_job(folder, models)).read_text())
    job["spec"]["rewards"]["sources"][0]["timeoutSeconds"] = PATIENCE_SECONDS
    job_file.write_text(yaml.safe_dump(job))
    run = Started(job_file, "run", *SETTINGS)
    try:
        yield watch(run, job_file)
    finally:
        run.process.kill()
        run.process.communicate()


def watch(run: Started, job_file: Path) -> Watched:
    run.until("(7 of 7)")
    connections = run.folder / "processes" / "connections.json"
    scraper = Scraper(connections)
    with Adviser(connections, seed=1, every_seconds=0.2):
        killed = kill_a_generator_that_is_at_work(run, scraper, go_on=job_file.parent / "go-on-0")
        run.until("step 1/")
        lose_the_servers(run, scraper)
        (job_file.parent / "go-on-1").touch()
        code, output = run.ended()
    assert code == 0, output
    return Watched(run.folder, killed, [scraper.first, *scraper.scrapes])


def kill_a_generator_that_is_at_work(run: Started, scraper: Scraper, go_on: Path) -> int:
    """Kill a generator with traced work in the second step, and return its number."""
    before, pids = scraper.look(), {worker: run.pid_of("generator", worker) for worker in (0, 1)}
    scraper.first = scraper.ask()
    assert set(values_of(scraper.first, "rlhfspec_restarts_total", stage="generator")) == {0.0}, "said before the first"

    def there_were_moves() -> bool:
        scraper.first = scraper.ask()
        return bool(values_of(scraper.first, "rlhfspec_move_bytes_total"))

    def one_has_what_it_told() -> list[int]:
        lasts = [last_of(life) for life in lives(read_spans(run.folder)) if life.stays]
        has = Counter(last.worker for last in lasts if last.is_open)
        return [worker for worker, number in has.items() if number >= MANY]

    with slowed(*pids.values()):
        go_on.touch()
        eventually(there_were_moves, "there were moves")
    worker = caught(
        [*pids.values()], one_has_what_it_told, "one has had samples for a while",
        moment_seconds=MOMENT_SECONDS, still_seconds=STILL_SECONDS,
    )[0]  # fmt: skip
    os.kill(pids[1 - worker], signal.SIGCONT)
    os.kill(pids[worker], signal.SIGKILL)
    name = f"generator-{worker}"
    eventually(lambda: scraper.look()[name] != before[name], "there is another one")
    assert values_of(scraper.ask(), "rlhfspec_restarts_total", stage="generator", worker=str(worker)) == [1.0]
    return int(worker)


def last_of(life: Life) -> Span:
    return max((*life.stays, *life.moves), key=lambda span: (span.delivery == 1, span.began))


def lose_the_servers(run: Started, scraper: Scraper) -> None:
    scraper.scrape()

    def reconnects(server: str) -> list[float]:
        return values_of(scraper.ask(), "rlhfspec_reconnects_total", server=server)

    assert reconnects("nats") == [0.0] * 8, "said before the first loss, by each worker and the supervisor"
    for number in range(1, LOSSES + 1):
        [pid] = named(run.connections["uid"], "nats")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda number=number: min(reconnects("nats")) >= number, f"all have NATS again after loss {number}")
        scraper.scrape()
    [pid] = named(run.connections["uid"], "redis")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: max(reconnects("redis")) >= 1.0, "somebody has Redis again")
    scraper.scrape()


def test_every_metric_that_is_named_is_served_with_a_value(watched: Watched) -> None:
    """Metrics of learning drafters are checked in supervisor/test_processes_learning.py."""
    wanted = {name for name in named_anywhere() if not name.startswith("rlhfspec_operator_")} - OF_LEARNING
    assert len(wanted) > 25
    served = {name for name in names_of(watched.scrapes) if name.startswith("rlhfspec_")}
    assert wanted <= served, sorted(wanted - served)
    assert set(map(family, wanted)) == set(map(family, served)), "what is served is documented"


def test_a_server_that_is_lost_more_than_five_times_is_told(watched: Watched) -> None:
    """The process that counts most decides, though each one loses the server every time."""
    expression = rule(BROKER_AWAY)["expr"]
    metric, bound = "rlhfspec_reconnects_total", float(expression.rpartition(">")[2])
    assert expression == f"max by (namespace, rlhfjob, server) (increase({metric}[10m])) > {bound:g}"
    most = [max(values_of(scrape, metric, **TARGET, server="nats")) for scrape in watched.scrapes[1:]]
    assert most[0] == 0.0, "before the first loss"
    assert most[1] <= bound < most[LOSSES]


def test_traces_mark_the_work_of_a_killed_generator_as_in_vain(watched: Watched) -> None:
    """The generator had traced some samples, and received others only just before the kill."""
    lost = [life for life in lives(read_spans(watched.folder)) if any(map(life.is_in_vain, life.stays))]
    lasts = [last_of(life) for life in lost]
    assert any(last.is_open for last in lasts)
    for life, last in zip(lost, lasts, strict=True):
        if last.is_open or last.name == "move":
            assert (last.worker if last.is_open else last.attributes["destination"]) == watched.killed
        else:  # it had left the other for the killed one, which never said that it had it: then no move is told of
            assert last.worker == 1 - watched.killed
        first = next(stay for stay in life.stays if not life.is_in_vain(stay))
        assert first.delivery == 2
        assert first.sent == last.ended <= first.began, "what it was in vain for was no queue"
        assert first.began - life.began > 1.0
