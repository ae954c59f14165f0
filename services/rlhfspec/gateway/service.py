from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfspec.common.web import listen, serving
from rlhfspec.door.generators import GeneratorCalls
from rlhfspec.door.server import PolicyDoor, variables
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import WorkerInfo
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Inbox
from rlhfspec.stage.context import GatewayContext
from rlhfspec.stage.tasks import together
from rlhfspec.stage.vitals import Vitals
from rlhfspec.worker.health import LOOPBACK


class LocalGateway(Service):
    """Server of OpenAI clients beside the stages of a run in one process.

    Consumes and produces nothing; waits for requests; unblocked by clients.
    """

    def __init__(self, vitals: Vitals, door: PolicyDoor, port: int, say: Callable[[str], None]) -> None:
        super().__init__("gateway", 0, vitals)
        self._door = door
        self._listening = listen(LOOPBACK, port, option="--serve")
        self._say = say
        self.leaving.callback(self._listening.close)

    async def run(self) -> None:
        async with serving(self._door.app(), self._listening) as port:
            for line in variables(LOOPBACK, port, self._door.token):
                self._say(line)
            with self.vitals.waiting("requests of clients"):
                await self.stopping.wait()


class GatewayService(Service):
    """Server of OpenAI clients in a process of its own, which calls the generators of the run.

    Consumes and produces nothing; waits for requests; unblocked by clients. Clients that come before a generator is
    ready wait in the queue of the port.
    """

    def __init__(self, job: RLHFJob, context: GatewayContext, tokenizer: Any) -> None:
        super().__init__("gateway", context.worker, context.vitals)
        self._bus = context.bus
        self._calls = GeneratorCalls(context.control)
        self._tokenizer = tokenizer
        self._name = job.metadata.name
        self._token = context.token
        self._folder = RunFolder(context.run.folder)
        self._listening = listen(context.host, context.port, option="--serve")
        self.leaving.callback(self._listening.close)

    async def run(self) -> None:
        async with await self._bus.subscribe(WorkerInfo) as infos:
            try:
                await together(self._hear(infos), self._serve())
            finally:
                self._calls.close()

    async def _hear(self, infos: Inbox[WorkerInfo]) -> None:
        async for arrived in self.arrivals(infos):
            for delivery in arrived:
                self._calls.meet(delivery.record)

    async def _serve(self) -> None:
        with self.vitals.waiting("a generator"):
            await self.unless_stopped(self._calls.until_ready())
        if self.stopping.is_set():
            return
        door = PolicyDoor(self._calls, self._tokenizer, name=self._name, token=self._token, run=self._folder)
        async with serving(door.app(), self._listening):
            with self.vitals.waiting("requests of clients"):
                await self.stopping.wait()
