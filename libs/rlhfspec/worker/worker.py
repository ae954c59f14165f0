"""Worker of a stage in its own process."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.errors import InvalidRequest, TransportUnavailable
from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import CLIENT_TOKEN_VARIABLE, Connections, client_token_file
from rlhfspec.messages.access.rights import GUESTS
from rlhfspec.messages.loop import GATEWAY, deadline_of, workers_of
from rlhfspec.messages.records import WorkerInfo
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.context import Context, GatewayContext, GeneratorContext, Run, TrainerContext
from rlhfspec.stage.guest import HostedScoring, HostedVitals
from rlhfspec.stage.pace import Heartbeats
from rlhfspec.stage.supervisor import GRACE_SECONDS, Supervisor
from rlhfspec.stage.threads import ComputeThread
from rlhfspec.stage.vitals import Vitals, WorkerVitals
from rlhfspec.telemetry.base import Watcher
from rlhfspec.telemetry.opening import Observation, watching
from rlhfspec.worker import exits
from rlhfspec.worker.health import LOOPBACK, Health
from rlhfspec.worker.last_words import ActivityFile, leaves_at_once
from rlhfspec.worker.mirror import Mirror, Mirroring
from rlhfspec.worker.worker_weights import WorkerWeights

if TYPE_CHECKING:
    from rlhfspec.training.weights import WeightStore
    from rlhfspec.training.weights.group.sender import GroupSender
    from rlhfspec.worker.ends import MoveEndpoint

_HOST_VARIABLE = "RLHFSPEC_HOST"  # environment variable: address to listen at, and for other workers
LEAVING_SECONDS = 15.0  # for a server that is away while this worker leaves
OPENING_SECONDS = 300.0  # for NATS to answer, and for `control` or the supervisor to open the run
Connect = Callable[[str, int], Awaitable[Bus]]  # connects with the rights of a stage's worker
log = logging.getLogger("rlhfspec.stage")


class StageWorker:
    def __init__(
        self, stage: str, worker: int, connections: Connections, job: RLHFJob, mirror: Mirror | None = None
    ) -> None:
        self._stage = stage
        self._worker = worker
        self._connections = connections
        self._job = job
        self._mirror = mirror
        self._stop = asyncio.Event()
        self._is_built = False
        self._incarnation = incarnation_of(stage, worker)
        self._transports: list[NatsTransport] = []
        self._host = host_told(os.environ)

    def run(self) -> str:
        return asyncio.run(self._main())

    async def _main(self) -> str:
        connections, stage, worker = self._connections, self._stage, self._worker
        async with AsyncExitStack() as leaving:
            watched = leaving.enter_context(self._watching())
            assert watched.meters is not None
            watched.meters.reconnects("nats", lambda: sum(each.num_reconnects for each in self._transports))
            vitals = Vitals(AwakeClock(), told=watched.meters.worked, note=self._activity_file())
            leaving.push_async_callback(self._close_transports)
            health = Health(
                stage, worker, vitals, connections.credentials, metrics=watched.metrics_text,
                host=self._host, http_port=connections.http_port, grpc_port=connections.grpc_port,
            )  # fmt: skip
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._asked_to_leave, health)
            leaving.callback(asyncio.create_task(health.keep_beating()).cancel)
            connect = partial(self._connect, vitals.clock, watched.watcher)
            bus = await connect(stage, worker)
            weights = WorkerWeights(connections, self._job, bus.of(stage, worker), health)
            sender = self._group_sender(health, leaving)
            leaving.enter_context(health)
            with vitals.worker(stage, worker).waiting("the run to be opened"):  # the run may be opened concurrently
                await self._transports[0].until_declared(bus.last_declared, OPENING_SECONDS)
            at_end = leaving.enter_context(ExitStack())
            await leaving.enter_async_context(weights)
            say = _Saying()
            common: dict[str, Any] = {
                "worker": worker, "bus": bus.of(stage, worker), "weights": weights, "vitals": vitals,
                "run": self._run(), "say": say,
            }  # fmt: skip
            context = Context(**common)
            if stage == "trainer":
                context = TrainerContext(**common, at_end=at_end, group_sender=sender)
            elif stage == "generator":
                took = partial(watched.meters.took_weights, stage, worker)
                common["weights"] = self._receiving(weights, health, took, at_end)
                endpoint = self._move_endpoint(at_end)
                guest = guest_of(self._job, context, connect)
                context = GeneratorContext(
                    **common, move_endpoint=endpoint, hosted_scoring=guest, is_called=connections.serve_port is not None
                )
            elif stage == GATEWAY.name:
                context = self._gateway_context(common, at_end)
            service = await self._built(bus, context, say)
            await bus.publish(self._info(service, health, context))
            health.ready()
            await self._supervised(service, bus, vitals)
            return service.said_at_the_end

    def _asked_to_leave(self, health: Health) -> None:
        """Start a graceful exit. During loading, or at a second request, exit at once."""
        if self._stop.is_set() or not self._is_built:
            leaves_at_once("at once" if self._is_built else "before it had begun")
            os._exit(exits.DONE)
        self._stop.set()
        health.draining()
        for transport in self._transports:
            transport.hurry(LEAVING_SECONDS)

    def _watching(self) -> AbstractContextManager[Observation]:
        connections, observability = self._connections, self._job.spec.observability
        return watching(
            self._job.metadata.name,
            connections.uid,
            run=connections.folder if observability.traces else None,
            otlp_endpoint=connections.otlp_endpoint or observability.otlp_endpoint,
            metrics=True,
        )

    def _activity_file(self) -> ActivityFile | None:
        folder = self._connections.activity_folder
        return None if folder is None else ActivityFile(folder / f"{self._stage}-{self._worker}")

    async def _connect(self, clock: Clock, watcher: Watcher | None, stage: str, worker: int) -> Bus:
        """Connect with the rights of a stage. A hand-started worker's number may exceed the job's."""
        transport = await connect(
            self._connections, stage, name=f"{stage}-{worker}", clock=clock, patience_seconds=OPENING_SECONDS
        )
        self._transports.append(transport)
        workers = workers_of(self._job, is_served=self._connections.serve_port is not None)
        workers[stage] = max(workers[stage], worker + 1)
        bus = Bus(transport, self._job.metadata.name, uid=self._connections.uid, workers=workers, clock=clock)
        bus.watcher = watcher
        return bus

    async def _close_transports(self) -> None:
        for transport in self._transports:
            await transport.close()

    def _run(self) -> Run:
        connections = self._connections
        return Run(
            uid=connections.uid,
            base_folder=connections.base_folder,
            folder=connections.folder,
            folder_is_kept_by=connections.folder_is_kept_by,
            mirror=self._mirror,
        )

    def _move_endpoint(self, at_end: ExitStack) -> MoveEndpoint:
        from rlhfspec.worker.ends import MoveEndpoint

        connections = self._connections
        endpoint = MoveEndpoint.between_processes(
            self._incarnation, self._stage, self._host, connections.credentials, port=connections.moves_port,
            link_port=connections.link_port, worker_host=connections.worker_host,
        )  # fmt: skip
        at_end.callback(endpoint.close)
        return endpoint

    def _gateway_context(self, common: dict[str, Any], at_end: ExitStack) -> GatewayContext:
        from rlhfspec.worker.ends import calling

        port, credentials = self._connections.serve_port, self._connections.credentials
        assert port is not None, "process.py asks for it"
        if credentials is None:
            raise InvalidRequest("credentials", None, "the gateway needs certificates")
        control = calling(credentials, self._connections.worker_host)
        at_end.callback(control.close)
        is_in_a_pod = self._connections.worker_host is not None  # where `kubectl port-forward` comes from loopback
        token = token_of_clients(credentials, os.environ if is_in_a_pod else {})
        everywhere = "::" if ":" in self._host else "0.0.0.0"
        host = everywhere if is_in_a_pod else LOOPBACK
        return GatewayContext(**common, control=control, host=host, port=port, token=token)

    def _group_sender(self, health: Health, leaving: AsyncExitStack) -> GroupSender | None:
        if self._stage != "trainer" or self._job.spec.roles.generator.weights == "store":
            return None
        from rlhfspec.worker.weight_group import group_sender, travel_by_group

        if not travel_by_group(self._job):
            return None
        sender = group_sender(self._connections, self._job, health)
        leaving.callback(sender.close)
        return sender

    def _receiving(
        self, weights: WorkerWeights, health: Health, told: Callable[[str, float], None], at_end: ExitStack
    ) -> WeightStore:
        if self._job.spec.roles.generator.weights == "store":
            return weights
        from rlhfspec.worker.weight_group import receiving, travel_by_group

        if not travel_by_group(self._job):
            return weights
        store = receiving(
            weights, self._connections, self._job,
            address=health.grpc_address, trainer_address=weights.trainer_address, told=told,
        )  # fmt: skip
        at_end.callback(store.close)
        return store

    async def _built(self, bus: Bus, context: Context, say: _Saying) -> Service:
        """Build the service in a thread, and meanwhile send heartbeats about the loading."""
        vitals = Vitals(context.vitals.clock, note=context.vitals.note)
        deadline = deadline_of(self._job, self._stage)
        beating = asyncio.create_task(Heartbeats(bus, vitals).run())
        thread = ComputeThread("build")
        build = import_module(f"rlhfspec.{self._stage}.build").build
        try:
            with say.during(vitals.worker(self._stage, self._worker), deadline):
                service: Service = await thread.in_thread(build, self._job, context)
        finally:
            thread.close()
            beating.cancel()
        self._is_built = True
        return service

    async def _supervised(self, service: Service, bus: Bus, vitals: Vitals) -> None:
        supervisor = Supervisor(vitals, stall_seconds=float("inf"), grace_seconds=GRACE_SECONDS, final=(self._stage,))
        services = [service, *service.beside, Heartbeats(bus, vitals)]
        if self._mirror is not None and self._stage != "trainer":  # the trainer sends after each checkpoint
            services.append(Mirroring(self._mirror))
        await supervisor.run(services, self._stop)

    def _info(self, service: Service, health: Health, context: Context) -> WorkerInfo:
        endpoint = context.move_endpoint if isinstance(context, GeneratorContext) else None
        return WorkerInfo(
            id=self._incarnation,
            job=self._job.metadata.name,
            stage=self._stage,
            worker=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            grpc_address=health.grpc_address,
            http_address=health.http_address,
            moves_address=endpoint.address if endpoint else "",
            models=service.models,
        )


def guest_of(job: RLHFJob, host: Context, connect: Connect) -> HostedScoring | None:
    """Return the scoring service that this worker runs while idle, or None."""
    running = workers_of(job)
    stage = next((stage for stage in GUESTS.get(host.bus.stage.name, ()) if stage in running), None)
    if stage is None or "rebalancer" not in running:
        return None
    return HostedScoring(stage, partial(_make, job, stage, running[stage] + host.worker, host, connect))


async def _make(job: RLHFJob, stage: str, worker: int, host: Context, connect: Connect) -> Service:
    vitals = HostedVitals(host.vitals, host.bus.stage.name, host.worker)
    deadline = getattr(job.spec.roles, stage).deadline_seconds
    thread = ComputeThread(f"{stage}-build")
    try:
        with vitals.worker(stage, worker).working(f"preparing to help {stage}", deadline_seconds=deadline):
            bus = await connect(stage, worker)
            context = Context(
                worker=worker,
                bus=bus.of(stage, worker),
                weights=host.weights,
                vitals=vitals,
                run=host.run,
                say=lambda text: log.info("%s, to help %s", text, stage),
            )
            build = import_module(f"rlhfspec.{stage}.build").build
            service: Service = await thread.in_thread(build, job, context)
            return service
    finally:
        thread.close()


def host_told(environment: Mapping[str, str]) -> str:
    """Return the address to listen at, after binding to it once as a check.

    >>> host_told({_HOST_VARIABLE: "300.1.2.3"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    rlhfspec.errors.InvalidRequest: RLHFSPEC_HOST: in the environment, is not an address of this machine: ...
    """
    host = environment.get(_HOST_VARIABLE) or LOOPBACK
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.bind((host, 0))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TransportUnavailable(host, "no port is free (net.ipv4.ip_local_port_range)") from None
        raise InvalidRequest(
            _HOST_VARIABLE, host, f"in the environment, is not an address of this machine: {error.strerror}"
        ) from None
    return host


def token_of_clients(credentials: Path, environment: Mapping[str, str]) -> str:
    """Return the token of the gateway's clients, from a Secret of the user or else from ours."""
    token = environment.get(CLIENT_TOKEN_VARIABLE, client_token_file(credentials).read_text()).strip()
    if not token:
        raise InvalidRequest("spec.roles.gateway.tokenSecret", token, "the Secret's key token must not be empty")
    return token


def incarnation_of(stage: str, worker: int) -> str:
    return f"{stage}/{worker}/{secrets.token_hex(8)}"


class _Saying:
    """Logger of messages for the user; within `during`, the latest is also reported as the worker's activity."""

    def __init__(self) -> None:
        self._working: Callable[[str], AbstractContextManager[object]] | None = None
        self._loading = ExitStack()

    @contextmanager
    def during(self, vitals: WorkerVitals, deadline_seconds: float) -> Iterator[None]:
        self._working = partial(vitals.working, deadline_seconds=deadline_seconds)
        self("starting")
        try:
            yield
        finally:
            self._working = None
            self._loading.close()

    def __call__(self, text: str) -> None:
        log.info("%s", text, extra={"fields": {"said": self._working is None}})
        if self._working is not None:
            self._loading.close()
            self._loading.enter_context(self._working(text))
