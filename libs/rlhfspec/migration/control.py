"""How the two ends of a move reach each other: by a call in one process, by gRPC between processes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import CancelledError

import grpc

from rlhfspec.errors import MalformedRecord
from rlhfspec.migration.base import TELL_SECONDS, NoReply, Peer

log = logging.getLogger(__name__)
SERVICE, METHOD = "rlhfspec.migration.v1.Migration", "Tell"
MOST_CALLS = 8  # answered at once: each holds a thread of the server, which others need for health
MOST_CHANNELS = 256
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)  # who was away a moment ago is tried at once
Answer = Callable[[bytes], Awaitable[bytes]]


class DirectControl:
    """Between the movers of one process, by address."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    def serve(self, address: str, answer: Answer) -> None:
        self._answers[address] = answer

    async def ask(self, peer: Peer, message: bytes, *, timeout: float = TELL_SECONDS) -> bytes:
        answer = self._answers.get(peer.address)
        if answer is None:
            raise NoReply(peer.address, "nobody there")
        working = asyncio.ensure_future(answer(message))  # goes on after the asker lost patience, as a server does
        try:
            return await asyncio.wait_for(asyncio.shield(working), timeout)
        except TimeoutError:
            working.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise NoReply(peer.address, f"no reply for {timeout:g} s") from None


class GrpcControl:
    """Asks the servers of other processes. `credentials`: for TLS (`servers.certificates.channel_credentials`)."""

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._credentials = credentials
        self._channels: dict[str, grpc.Channel] = {}

    async def ask(self, peer: Peer, message: bytes, *, timeout: float = TELL_SECONDS) -> bytes:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        method = self._channel(peer.address).unary_unary(f"/{SERVICE}/{METHOD}")
        call = method.future(message, timeout=timeout)
        call.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(ended.set))
        try:
            await ended.wait()
        finally:
            call.cancel()
        if call.code() is not grpc.StatusCode.OK:
            raise NoReply(peer.address, f"{call.code().name.lower()}: {call.details()}")
        return bytes(call.result())

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _channel(self, address: str) -> grpc.Channel:
        """One for each peer, kept; the one longest not asked makes room."""
        channel = self._channels.pop(address, None) or self._open(address)
        self._channels[address] = channel
        if len(self._channels) > MOST_CHANNELS:
            self._channels.pop(next(iter(self._channels))).close()
        return channel

    def _open(self, address: str) -> grpc.Channel:
        target = f"dns:///{address}"  # whatever an address may look like, it is no other scheme
        if self._credentials is None:
            return grpc.insecure_channel(target, options=OPTIONS)
        return grpc.secure_channel(target, self._credentials, options=OPTIONS)


class GrpcControlServer:
    """Hands what comes to `answer`, in the event loop. `askers`: names in the certificates of those who may ask; None:
    whoever can connect. Made in the running event loop."""

    def __init__(self, answer: Answer, *, askers: Collection[str] | None = None) -> None:
        self._answer = answer
        self._askers = askers
        self._loop = asyncio.get_running_loop()
        self._free = threading.Semaphore(MOST_CALLS)
        self.refused: Counter[str] = Counter()  # by reason

    def add_to(self, server: grpc.Server) -> None:
        method = grpc.unary_unary_rpc_method_handler(self._serve)  # without serializers: bytes as they are
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))

    def _serve(self, content: bytes, context: grpc.ServicerContext) -> bytes:
        names = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", [])]
        if self._askers is not None and names and not set(names).intersection(self._askers):
            self._refuse("role", context, grpc.StatusCode.PERMISSION_DENIED, f"{names[0]} may not move sequences")
        if not self._free.acquire(blocking=False):
            self._refuse("busy", context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many questions at once")
        try:
            return self._answered(content, context)
        except MalformedRecord as error:
            self._refuse("malformed", context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("refused") from None
        finally:
            self._free.release()

    def _answered(self, content: bytes, context: grpc.ServicerContext) -> bytes:
        """Waits as long as the asker does; the answer is made to its end all the same."""
        if self._loop.is_closed():
            self._refuse("closed", context, grpc.StatusCode.UNAVAILABLE, "is leaving")
        working = asyncio.run_coroutine_threadsafe(_awaited(self._answer(content)), self._loop)
        try:
            return working.result(min(context.time_remaining() or TELL_SECONDS, TELL_SECONDS))
        except TimeoutError:
            self._refuse("slow", context, grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
        except CancelledError:  # its event loop ends
            self._refuse("closed", context, grpc.StatusCode.UNAVAILABLE, "is leaving")
        raise AssertionError("refused")

    def _refuse(self, kind: str, context: grpc.ServicerContext, code: grpc.StatusCode, reason: str) -> None:
        self.refused[kind] += 1
        log.warning("a question of a move refused to %s: %s", context.peer(), reason)
        context.abort(code, reason)


async def _awaited(answer: Awaitable[bytes]) -> bytes:
    return await answer
