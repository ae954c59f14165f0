"""The prompts whose samples the engine runs, each kept in progress until its sample is published or goes elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhfspec.generator.moving import MovedPrompt
from rlhfspec.generator.seconds import SharedSeconds
from rlhfspec.messages.records import Prompt
from rlhfspec.messages.wire.codec import encode
from rlhfspec.stage.bus import Delivery, Inbox
from rlhfspec.telemetry.base import SampleProgress


class PromptLeases:
    """Implements `moves.migration.base.Custody`, for what moves samples. `submitted` is told the step of each prompt
    that comes; `inbox` is where prompts come from, once there is one."""

    def __init__(self, seconds: SharedSeconds, submitted: Callable[[int], None]) -> None:
        self._seconds = seconds
        self._submitted = submitted
        self._running: dict[str, Delivery[Prompt]] = {}
        self.inbox: Inbox[Prompt]

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Delivery[Prompt]]:
        return iter(self._running.values())

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._running

    @property
    def ids(self) -> list[str]:
        return list(self._running)

    def begin(self, delivery: Delivery[Prompt]) -> None:
        """Keep a prompt in progress; of one that runs already, by its redelivery from now on."""
        if delivery.record.id not in self._running:
            self._seconds.begin(delivery.record.id)
        self._running[delivery.record.id] = delivery

    def end(self, sample_id: str) -> tuple[Delivery[Prompt], float]:
        """Return the prompt of a finished sample, to be acknowledged, and the seconds that the sample took."""
        return self._running.pop(sample_id), self._seconds.end(sample_id)

    # -- custody, while samples move ------------------------------------------------------------------------

    def prompt_of(self, sample_id: str) -> tuple[bytes, str] | None:
        delivery = self._running.get(sample_id)
        if delivery is None:
            return None
        moved = MovedPrompt(encode(delivery.record), delivery.headers, self._seconds.of(sample_id))
        return moved.to_bytes(), delivery.held.token

    async def taken(self, sample_id: str, prompt: bytes, token: str) -> None:
        moved = MovedPrompt.read(prompt)
        delivery = await self.inbox.adopt(moved.record, sample_id, token, moved.headers)
        self._running[sample_id] = delivery
        self._seconds.begin(sample_id, moved.seconds)
        self._submitted(delivery.record.step)

    def arrived(self, sample_id: str, progress: SampleProgress) -> None:
        seconds = self._seconds.of(sample_id)
        self.inbox.arrived(self._running[sample_id], progress._replace(seconds=seconds))

    def given(self, sample_id: str, progress: SampleProgress | None) -> None:
        delivery, seconds = self.end(sample_id)
        delivery.held.leave(progress and progress._replace(seconds=seconds))

    forgotten = given  # nothing ends it: if need be it is delivered again
