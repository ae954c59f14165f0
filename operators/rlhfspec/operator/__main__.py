"""Run one replica of the operator."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from rlhfspec.cluster import names
from rlhfspec.errors import InvalidRequest
from rlhfspec.operator.running import Operator, ReplicaPlace
from rlhfspec.operator.settings import ChartSettings, OperatorFile
from rlhfspec.operator.shared.release import credentials_by, keys_of, proof_by, servers_of
from rlhfspec.stage import logs
from rlhfspec.worker.exits import PERMANENT


def main() -> int:
    asked = _parser().parse_args()
    with logs.configure(job="", run="", stage="operator", worker=0, stream=sys.stdout):
        try:
            asyncio.run(_operator(asked).run())
        except InvalidRequest as error:
            print(error, file=sys.stderr)
            return PERMANENT
    return 0


def _operator(asked: argparse.Namespace) -> Operator:
    told = OperatorFile.read(asked.settings)
    keys = keys_of(asked.keys)
    pod = os.environ.get("RLHFSPEC_POD") or None
    place = ReplicaPlace(pod, asked.host, asked.http_port, asked.report_port, asked.tls)
    settings = ChartSettings.of(told, credentials_by(keys), proof_by(keys))
    return Operator(settings, place, servers_of(told, keys, asked.keys))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlhfspec.operator", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of rlhfspec.operator.settings")
    parser.add_argument("--keys", type=Path, default=Path("/etc/rlhfspec-keys"), help="mount of RELEASE-keys")
    parser.add_argument("--tls", type=Path, default=Path("/etc/rlhfspec-tls"), help="mount of RELEASE-operator-tls")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--http-port", type=int, default=names.HTTP_PORT, help="/healthz, /readyz, /metrics")
    parser.add_argument("--report-port", type=int, default=names.REPORT_PORT, help="HTTPS port for reports of jobs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
