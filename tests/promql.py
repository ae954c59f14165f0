"""Alert rules on samples that were scraped: by Prometheus' own `promtool` where it is installed, and the one shape of
expression that RLHFBrokerAway has by a few lines of ours, which the tests compare with promtool.

    max by (LABELS) (increase(METRIC[RANGE])) > NUMBER

`increase` is as Prometheus has it, a fall being a restart from zero; only that Prometheus also fills up what the
samples do not cover of the range, and so says a little more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import CHART, ROOT

PROMTOOL = os.environ.get("RLHFSPEC_PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool (of Prometheus 3): set RLHFSPEC_PROMTOOL, or put it on the PATH"
)
SCRAPE_SECONDS = 15  # of the chart's PodMonitors
Labels = tuple[tuple[str, str], ...]  # sorted, with __name__
Series = Mapping[Labels, Sequence[float | None]]  # a value for each scrape; None: it was not there
_SHAPE = re.compile(r"max by \(([\w, ]+)\) \(increase\((\w+)\[(\d+)m\]\)\) > (\d+)")


def named_anywhere() -> set[str]:
    """Our metrics in the chart, its dashboards and rules, and the documents."""
    files = [path for path in CHART.rglob("*") if path.suffix in (".yaml", ".json", ".tpl", ".txt")]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {name for path in files for name in re.findall(r"(?<!\w)rlhfspec_[a-z_]+", path.read_text())}


def family(name: str) -> str:
    """
    >>> family("rlhfspec_queue_seconds_bucket"), family("rlhfspec_moves_total"), family("rlhfspec_step")
    ('rlhfspec_queue_seconds', 'rlhfspec_moves', 'rlhfspec_step')
    """
    return re.sub(r"_(bucket|sum|count|total|created)$", "", name)


def exceeding(expression: str, series: Series, *, at: int) -> list[dict[str, str]]:
    """The labels of each alert that there is after so many scrapes (0: after the first one)."""
    matched = _SHAPE.fullmatch(" ".join(expression.split()))
    assert matched is not None, f"of another shape: {expression}"
    kept, metric, minutes, bound = matched[1].split(", "), matched[2], int(matched[3]), float(matched[4])
    most: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, values in series.items():
        told = dict(labels)
        if told["__name__"] == metric:
            key = tuple((name, told[name]) for name in kept if name in told)
            risen = increase(values[: at + 1], range_seconds=60.0 * minutes)
            most[key] = max(most.get(key, 0.0), risen)
    return [dict(key) for key, value in most.items() if value > bound]


def increase(values: Sequence[float | None], *, range_seconds: float) -> float:
    """
    >>> increase([0, 1, None, 2], range_seconds=600.0), increase([3], range_seconds=600.0)
    (2.0, 0.0)
    >>> increase([5, 6, 1, 2], range_seconds=600.0), increase([0, 5, 6], range_seconds=20.0)
    (3.0, 1.0)
    """
    in_range = values[-int(range_seconds // SCRAPE_SECONDS) - 1 :]
    there = [value for value in in_range if value is not None]
    return float(sum(after - before if after >= before else after for before, after in pairwise(there)))


def promtool_alerts(
    rules: Path, alert: str, series: Series, *, at: int, expected: list[dict[str, Any]], folder: Path
) -> str:
    """What promtool complains of when exactly the expected alerts are to fire; empty: they do."""
    assert PROMTOOL is not None
    told = {
        "rule_files": [str(rules)],
        "evaluation_interval": f"{SCRAPE_SECONDS}s",
        "tests": [
            {
                "interval": f"{SCRAPE_SECONDS}s",
                "input_series": [{"series": _written(labels), "values": _values(series[labels])} for labels in series],
                "alert_rule_test": [
                    {"eval_time": f"{at * SCRAPE_SECONDS}s", "alertname": alert, "exp_alerts": expected}
                ],
            }
        ],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", str(folder / "test.yaml")], capture_output=True, text=True, timeout=120
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _written(labels: Labels) -> str:
    name = dict(labels)["__name__"]
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels if key != "__name__") + "}"


def _values(values: Sequence[float | None]) -> str:
    return " ".join("_" if value is None else f"{value:g}" for value in values)
