"""`python -m rlhfspec.dashboard`: the dashboard of a cluster, over HTTP, or HTTPS with a certificate."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import ssl
import sys
from pathlib import Path

from rlhfspec.cluster import names
from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import Api
from rlhfspec.common.web import serve
from rlhfspec.dashboard.access import ClusterAccess
from rlhfspec.dashboard.jobs.cluster import ClusterSource, Servers
from rlhfspec.dashboard.server import Dashboard
from rlhfspec.errors import InvalidRequest, RLHFSpecError
from rlhfspec.worker import exits

log = logging.getLogger("rlhfspec.dashboard")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve(_arguments()))
    except RLHFSpecError as error:
        log.error("%s", error)
        return exits.code_of(error)
    return exits.DONE


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhfspec.dashboard",
        description="Read-only web dashboard of a cluster. Users see the jobs that the API server lets them see.",
    )
    add = parser.add_argument
    add("--host", default="", help="address to listen on (default: all)")
    add("--port", type=int, default=names.DASHBOARD_PORT)
    add("--namespace", action="append", default=[], metavar="NAME", help="namespace to show; repeatable (default: all)")
    add("--nats-url", metavar="URL", help="URL of NATS, tls://HOST:PORT; without it there are no live updates")
    add("--redis-url", metavar="URL", help="URL of Redis, rediss://HOST:PORT")
    add("--credentials", type=Path, default=Path(names.CREDENTIALS), metavar="FOLDER")
    add("--storage", type=Path, metavar="FOLDER", help="folder where a claim with run folders is mounted")
    add("--storage-claim", default="", metavar="NAME", help="name of that claim, for jobs that name it")
    add("--storage-namespace", default="", metavar="NAME", help="namespace of that claim (default: the pod's)")
    add("--tls-cert", type=Path, metavar="FILE")
    add("--tls-key", type=Path, metavar="FILE")
    add("--kubeconfig", type=Path, metavar="FILE", help="kubeconfig, if the dashboard does not run in a pod")
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    kubeconfig = None if arguments.kubeconfig is None else str(arguments.kubeconfig)
    servers = Servers(
        nats_url=arguments.nats_url,
        redis_url=arguments.redis_url,
        credentials=arguments.credentials if arguments.credentials.is_dir() else None,
        storage=arguments.storage,
        storage_claim=arguments.storage_claim,
        storage_namespace=arguments.storage_namespace or os.environ.get("POD_NAMESPACE", ""),
    )
    # No retries: a user waits for the page.
    async with Api(KubeAccess(kubeconfig), agent="rlhfspec-dashboard", deadline_seconds=0.0) as api:
        source = ClusterSource(api, servers, namespaces=arguments.namespace)
        await serve(
            Dashboard(source, ClusterAccess(api)).app(), arguments.host, arguments.port,
            tls=_tls(arguments.tls_cert, arguments.tls_key),
            ready=lambda port: log.info("listening on port %d", port),
        )  # fmt: skip


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InvalidRequest("--tls-cert", str(certificate), "must be given together with --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise InvalidRequest("--tls-cert", str(certificate), f"cannot be loaded with --tls-key: {error}") from None
    return context


if __name__ == "__main__":
    sys.exit(main())
