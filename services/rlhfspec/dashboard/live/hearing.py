"""Subscriber to a run's signals on NATS, which may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from rlhfspec.dashboard.jobs.source import Address
from rlhfspec.errors import InvalidRequest, MalformedRecord
from rlhfspec.messages import loop
from rlhfspec.messages.access.connecting import access_of
from rlhfspec.messages.records import EvaluationReport, Moved, Record, StepReport
from rlhfspec.messages.transport.jetstream.connection import quiet_about_tls
from rlhfspec.messages.wire.codec import decode
from rlhfspec.runs.live.redis_client import words_of
from rlhfspec.stage.tasks import to_the_end

HEARD: tuple[type[Record], ...] = (Moved, StepReport, EvaluationReport)
_NATS_RETRY_SECONDS = 2.0


class Hearing:
    """Subscriber to a run's signals. `problem`: the reason why none arrive, or an empty text."""

    def __init__(self, address: Address, heard: Callable[[Record], None]) -> None:
        self.problem = "NATS: connecting"
        self.num_refused = 0  # messages that are not records of this run
        self._address = address
        self._heard = heard

    async def run(self) -> None:
        while True:
            client = Client()
            try:
                await self._connect(client)
                for record_type in HEARD:
                    await client.subscribe(
                        loop.subject(self._address.job, self._address.uid, record_type), cb=self._arrived
                    )
                self.problem = ""
                await asyncio.Event().wait()
            except (nats.errors.Error, OSError, TimeoutError, InvalidRequest) as error:
                self.problem = f"NATS: {words_of(error)}"
            finally:
                await to_the_end(_closed(client))
            await asyncio.sleep(_NATS_RETRY_SECONDS)

    async def _connect(self, client: Client) -> None:
        assert self._address.nats_url is not None
        await client.connect(
            [self._address.nats_url],
            name="dashboard",
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            connect_timeout=3,
            ping_interval=5,
            max_outstanding_pings=2,
            error_cb=self._failed,
            disconnected_cb=self._away,
            reconnected_cb=self._back,
            **_credentials(self._address),
        )

    async def _arrived(self, message: Msg) -> None:
        try:
            record = decode(message.data)
        except MalformedRecord:
            self.num_refused += 1
            return
        if isinstance(record, HEARD) and record.job == self._address.job:
            self._heard(record)
        else:
            self.num_refused += 1

    async def _failed(self, error: Exception) -> None:
        if not isinstance(error, nats.errors.SlowConsumerError):  # signals may be lost
            self.problem = f"NATS: {words_of(error)}"

    async def _away(self) -> None:
        self.problem = "NATS: connection lost"

    async def _back(self) -> None:
        self.problem = ""


def _credentials(address: Address) -> dict[str, Any]:
    access = access_of(address.credentials, address.role, address.uid)
    access.proof.check()
    if access.tls is None:
        return access.proof.options()
    quiet_about_tls()
    return {**access.proof.options(), "tls": access.tls}


async def _closed(client: Client) -> None:
    with suppress(nats.errors.Error, OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            await client.close()
