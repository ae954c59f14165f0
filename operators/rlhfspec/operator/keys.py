"""Create the missing Secrets of a release, without changing existing ones.

All are derived from the operator's `NAME-keys`. `NAME-nats` and `NAME-redis` configure the servers, `NAME-operator-tls`
serves the endpoint for reports, and `NAME-dashboard` gives read access to runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import UTC, datetime

from rlhfspec.cluster import names
from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import Api
from rlhfspec.errors import ClusterUnavailable, InvalidRequest
from rlhfspec.operator.shared.credentials import Keys, install_secrets, new_keys
from rlhfspec.worker.exits import PERMANENT, TEMPORARY


async def install(api: Api, namespace: str, release: str) -> list[str]:
    """Create missing Secrets and return one line per created Secret."""
    lines = []
    first = f"{release}-keys"
    if (data := await _data_of(api, namespace, first)) is None:
        lines += await _make(api, namespace, first, new_keys().data())
        data = await _data_of(api, namespace, first)  # a concurrent install may have won
        assert data is not None
    secrets = install_secrets(Keys.of(data), namespace=namespace, release=release, created=datetime.now(UTC))
    for name, content in secrets.items():
        if name != first and await _data_of(api, namespace, name) is None:
            lines += await _make(api, namespace, name, content)
    return lines or [f"nothing is missing: {', '.join(secrets)}"]


async def _data_of(api: Api, namespace: str, name: str) -> dict[str, bytes] | None:
    answer = await api.get("v1", "Secret", namespace, name)
    if answer.is_missing:
        return None
    if answer.is_refused:
        raise ClusterUnavailable(f"Secret {name}", answer.message)
    return {key: b64decode(value) for key, value in (answer.body.get("data") or {}).items()}


async def _make(api: Api, namespace: str, name: str, data: Mapping[str, bytes]) -> list[str]:
    labels = {names.NAME: "rlhfspec", names.MANAGED_BY: names.FIELD_MANAGER}
    answer = await api.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": labels},
            "data": {key: b64encode(value).decode() for key, value in data.items()},
        }
    )
    if answer.code == 409:
        return []
    if answer.is_refused:
        raise ClusterUnavailable(f"Secret {name}", answer.message)
    return [f"created Secret {namespace}/{name}: {', '.join(sorted(data))}"]


async def _install(namespace: str, release: str) -> list[str]:
    async with Api(KubeAccess()) as api:
        return await install(api, namespace, release)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlhfspec.operator.keys", description=__doc__)
    parser.add_argument("--namespace", required=True, help="namespace of the release")
    parser.add_argument("--release", required=True, help="prefix of the Secrets' names")
    asked = parser.parse_args()
    try:
        print(*asyncio.run(_install(asked.namespace, asked.release)), sep="\n")
    except InvalidRequest as error:
        print(error, file=sys.stderr)
        return PERMANENT
    except ClusterUnavailable as error:
        print(error, file=sys.stderr)
        return TEMPORARY
    return 0


if __name__ == "__main__":
    sys.exit(main())
