"""Grafana dashboards as data: titles and queries here, the JSON that Grafana wants of them made (`make chart`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_JOB = 'namespace=~"$namespace",rlhfjob=~"$rlhfjob"'
_WIDTH, _HEIGHT = 12, 8  # of a panel, of 24 columns


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: (PromQL, legend); `JOB` in it stands for the labels that choose the job."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    what: str = ""


GENERATION = (
    Panel("Tokens per second", (("rlhfspec_generator_tokens_per_second{JOB}", "generator {{worker}}"),)),
    Panel(
        "Drafted tokens accepted per verification",
        (("rlhfspec_generator_accepted_per_verification{JOB}", "generator {{worker}}"),),
    ),
    Panel(
        "Strategy",
        (
            (
                "sum by (strategy) (rate(rlhfspec_generator_strategies_total{JOB}[$__rate_interval])) / scalar("
                "sum(rate(rlhfspec_generator_strategies_total{JOB}[$__rate_interval])))",
                "{{strategy}}",
            ),
        ),
        "percentunit",
        "Share of generator reports by draft strategy; plain: without drafts",
    ),
    Panel(
        "Sequences",
        (
            ("rlhfspec_generator_running{JOB}", "running at {{worker}}"),
            ("rlhfspec_generator_waiting{JOB}", "waiting at {{worker}}"),
        ),
    ),
    Panel("Moves per minute", (("sum by (how) (rate(rlhfspec_moves_total{JOB}[5m])) * 60", "{{how}}"),)),
    Panel(
        "Pause of a moved sample",
        (
            ("histogram_quantile(0.5, sum by (le) (rate(rlhfspec_move_pause_seconds_bucket{JOB}[5m])))", "median"),
            ("histogram_quantile(0.99, sum by (le) (rate(rlhfspec_move_pause_seconds_bucket{JOB}[5m])))", "p99"),
        ),
        "s",
    ),
    Panel("Weights version", (("rlhfspec_weights_version{JOB}", "{{role}} at {{stage}} {{worker}}"),)),
    Panel(
        "Queue time of records, p95",
        (
            (
                "histogram_quantile(0.95, sum by (le, stage, type) (rate(rlhfspec_queue_seconds_bucket{JOB}[5m])))",
                "{{type}} by {{stage}}",
            ),
        ),
        "s",
    ),
)
TRAINING = (
    Panel("Reward", (("rlhfspec_step_reward{JOB}", "{{rlhfjob}}"),)),
    Panel("KL to the reference (k3)", (("rlhfspec_step_kl{JOB}", "{{rlhfjob}}"),)),
    Panel("Policy loss", (("rlhfspec_step_policy_loss{JOB}", "{{rlhfjob}}"),)),
    Panel("Entropy, nats per token", (("rlhfspec_step_entropy{JOB}", "{{rlhfjob}}"),)),
    Panel("Tokens per response", (("rlhfspec_step_response_length{JOB}", "{{rlhfjob}}"),)),
    Panel("Steps trained", (("rlhfspec_step{JOB}", "{{rlhfjob}}"),)),
    Panel(
        "Share of time by kind of work",
        (("sum by (stage, work) (rate(rlhfspec_work_seconds_sum{JOB}[5m]))", "{{stage}}: {{work}}"),),
        "percentunit",
    ),
    Panel(
        "Failures in the last 10 minutes",
        (
            ('sum by (type) (increase(rlhfspec_records_ended_total{JOB,how="term"}[10m]))', "undeliverable {{type}}"),
            ("max by (server) (increase(rlhfspec_reconnects_total{JOB}[10m]))", "{{server}} lost"),
            ("sum by (stage) (increase(rlhfspec_restarts_total{JOB}[10m]))", "{{stage}} restarted"),
        ),
    ),
)
OPERATOR = (
    Panel("Leader", (('rlhfspec_operator_leader{namespace=~"$namespace"}', "{{pod}}"),)),
    Panel("Jobs", (('max(rlhfspec_operator_jobs{namespace=~"$namespace"})', "jobs"),)),
    Panel(
        "Duration of a reconcile",
        tuple(
            (
                f"histogram_quantile({quantile}, sum by (le) "
                '(rate(rlhfspec_operator_reconcile_seconds_bucket{namespace=~"$namespace"}[5m])))',
                f"p{quantile * 100:.0f}",
            )
            for quantile in (0.5, 0.99)
        ),
        "s",
    ),
    Panel("Jobs due for a reconcile", (('rlhfspec_operator_queue_length{namespace=~"$namespace"}', "{{pod}}"),)),
    Panel(
        "Writes to the API server per second",
        (
            (
                'sum by (verb, kind) (rate(rlhfspec_operator_api_writes_total{namespace=~"$namespace"}[5m]))',
                "{{verb}} {{kind}}",
            ),
        ),
    ),
    Panel(
        "Failed reconciles",
        (('increase(rlhfspec_operator_reconcile_failures_total{namespace=~"$namespace"}[5m])', "{{pod}}"),),
    ),
)
DASHBOARDS = {
    "generation": ("RLHFSpec: generation", GENERATION, "rlhfspec_generator_running"),
    "training": ("RLHFSpec: training", TRAINING, "rlhfspec_step"),
    "operator": ("RLHFSpec: operator", OPERATOR, "rlhfspec_operator_leader"),
}


def dashboard(name: str) -> dict[str, Any]:
    title, panels, metric = DASHBOARDS[name]
    variables = [{"name": "datasource", "type": "datasource", "query": "prometheus"}, _variable("namespace", metric)]
    if name != "operator":
        variables.append(_variable("rlhfjob", f'{metric}{{namespace=~"$namespace"}}'))
    return {
        "uid": f"rlhfspec-{name}",
        "title": title,
        "tags": ["rlhfspec"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variable(label: str, metric: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": _DATA_SOURCE,
        "query": {"query": f"label_values({metric}, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, 24 // _WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": _DATA_SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"showPoints": "never"}}, "overrides": []},
        "targets": [
            {"refId": chr(65 + place), "datasource": _DATA_SOURCE, "expr": _expression(query), "legendFormat": legend}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def _expression(query: str) -> str:
    return query.replace("{JOB", "{" + _OF_JOB)
