"""Scraping of a run's processes as Prometheus does, each a target with its own labels."""

import asyncio
import re
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

from helm import CHART, ROOT
from prometheus_client.parser import text_string_to_metric_families

from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.loop import workers_of
from rlhfspec.messages.records import WorkerInfo
from rlhfspec.stage.bus import Bus

TARGET = {"namespace": "team", "rlhfjob": "letters"}  # what a PodMonitor adds to all of a job
OF_LEARNING = {  # of a drafter
    "rlhfspec_generator_drafter_version",
    "rlhfspec_generator_learning_seconds",
    "rlhfspec_generator_draft_level_share",
}
Labels = tuple[tuple[str, str], ...]  # sorted, with __name__
Scrape = dict[Labels, float]


class Scraper:
    def __init__(self, connections: Path) -> None:
        self._file = connections
        self._targets: dict[str, str] = {}
        self.scrapes: list[Scrape] = []
        self.first: Scrape = {}  # what a process that is gone since had to say

    def look(self) -> dict[str, str]:
        connections = Connections.read(self._file)
        found = asyncio.run(_workers(connections))
        assert connections.supervisor_address is not None
        self._targets = found | {"supervisor": connections.supervisor_address}
        return self._targets

    def scrape(self) -> Scrape:
        self.scrapes.append(self.ask())
        return self.scrapes[-1]

    def ask(self, *only: str) -> Scrape:
        """Scrape these processes, or all; leave out those that do not answer."""
        found: Scrape = {}
        for name in only or self._targets:
            address = self._targets[name]
            with suppress(URLError, ConnectionError, TimeoutError):
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                    text = answer.read().decode()
                found |= samples_of(text, TARGET | {"pod": name, "instance": address})
        return found


def values_of(scrape: Scrape, name: str, **wanted: str) -> list[float]:
    told = [(dict(labels), value) for labels, value in scrape.items()]
    return [value for labels, value in told if {**wanted, "__name__": name}.items() <= labels.items()]


def samples_of(text: str, target: Mapping[str, str]) -> Scrape:
    """Parse metrics. A label that the target sets itself wins."""
    return {
        tuple(sorted({**sample.labels, **target, "__name__": sample.name}.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def names_of(scrapes: list[Scrape]) -> set[str]:
    """Return names of metrics with a value; for a histogram also those of its parts."""
    names = {dict(labels)["__name__"] for scrape in scrapes for labels in scrape}
    return names | {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}


def named_anywhere() -> set[str]:
    files = [path for path in CHART.rglob("*") if path.suffix in (".yaml", ".json", ".tpl", ".txt")]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {name for path in files for name in re.findall(r"(?<!\w)rlhfspec_[a-z_]+", path.read_text())}


def family(name: str) -> str:
    """
    >>> family("rlhfspec_queue_seconds_bucket"), family("rlhfspec_moves_total"), family("rlhfspec_step")
    ('rlhfspec_queue_seconds', 'rlhfspec_moves', 'rlhfspec_step')
    """
    return re.sub(r"_(bucket|sum|count|total|created)$", "", name)


async def _workers(connections: Connections) -> dict[str, str]:
    job = connections.job()
    transport = await connect(connections, "view", name="scraper")
    try:
        workers = workers_of(job) | {"view": 1}
        bus = Bus(transport, job.metadata.name, uid=connections.uid, workers=workers)
        async with await bus.of("view").subscribe(WorkerInfo) as inbox:
            infos: dict[str, str] = {}
            while arrived := await inbox.pull(max_records=64, timeout_seconds=1.0):
                infos |= {f"{each.record.stage}-{each.record.worker}": each.record.http_address for each in arrived}
            return infos
    finally:
        await transport.close()
