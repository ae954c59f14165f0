from __future__ import annotations

from collections.abc import Callable

from rlhfspec.common.web import serving
from rlhfspec.door.server import PolicyDoor, variables
from rlhfspec.stage.base import Service
from rlhfspec.stage.vitals import Vitals


class GatewayService(Service):
    """Server of OpenAI clients beside the stages of a run.

    Consumes and produces nothing; waits for requests; unblocked by clients.
    """

    def __init__(self, vitals: Vitals, door: PolicyDoor, host: str, port: int, say: Callable[[str], None]) -> None:
        super().__init__("gateway", 0, vitals)
        self._door = door
        self._host = host
        self._port = port
        self._say = say

    async def run(self) -> None:
        async with serving(self._door.app(), self._host, self._port, option="--serve") as port:
            for line in variables(self._host, port, self._door.token):
                self._say(line)
            with self.vitals.waiting("requests of clients"):
                await self.stopping.wait()
