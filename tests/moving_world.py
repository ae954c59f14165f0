"""Model of three processes that move sequences over a faulty network; sets judge who owns each one."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from rlhfspec.moves.migration import messages, source as ours
from rlhfspec.moves.migration.destination import Destination, Judgement
from rlhfspec.moves.migration.source import MoveSource

MESSAGE_SECONDS = 25.0  # no message comes later than that
REDELIVERY_SECONDS = 30.0  # after the last one who kept it in progress
NODES = 3


@dataclass
class Engine:
    running: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    arriving: set[str] = field(default_factory=set)
    version: int = 0
    epochs: dict[str, int] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)  # reservations whose memory is lost

    def knows(self, sample: str) -> bool:
        return sample in self.running | self.away | self.arriving

    def cancel(self, sample: str) -> None:
        for place in (self.running, self.away, self.arriving, self.dropped):
            place.discard(sample)


@dataclass
class Node:
    index: int
    incarnation: str
    make: Callable[[str], Destination]
    engine: Engine = field(default_factory=Engine)
    keeps: set[str] = field(default_factory=set)  # prompts in progress
    has_own: set[str] = field(default_factory=set)  # that it had when they were handed over to it
    moves: dict[str, MoveSource] = field(default_factory=dict)  # by sample
    steps: dict[str, deque[ours.Action]] = field(default_factory=dict)  # of those, what is to be done next
    waits: dict[str, float] = field(default_factory=dict)
    work: list[messages.Told] = field(default_factory=list)  # of the engine, for what arrives
    targets: dict[str, int] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)  # what the present attempt began with
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.destination = self.make(self.incarnation)


class World:
    def __init__(
        self,
        samples: int = 2,
        make_source: Callable[..., MoveSource] = MoveSource,
        make_destination: Callable[[str], Destination] = Destination,
    ) -> None:
        self.now = 0.0
        self.make_source, self.make_destination = make_source, make_destination
        self.starts = itertools.count()
        self.nodes = [self.node(index) for index in range(NODES)]
        self.told: list[tuple[float, int, int, messages.Told]] = []  # until when, to, from
        self.replies: list[tuple[float, int, messages.Reply]] = []
        self.samples = [f"s{index}" for index in range(samples)]
        self.finished: set[str] = set()
        self.alone_since = dict.fromkeys(self.samples, 0.0)
        self.ends: list[str] = []
        self.num_crashes = 0
        for index, sample in enumerate(self.samples):
            self.give(sample, index % NODES)

    def node(self, index: int) -> Node:
        return Node(index, f"n{index}-{next(self.starts)}", self.make_destination)

    def give(self, sample: str, index: int) -> None:
        node = self.nodes[index]
        if not node.engine.knows(sample) and sample not in node.keeps:
            node.engine.running.add(sample)
            node.engine.epochs[sample] = node.engine.epochs.get(sample, 0) + 1
            node.keeps.add(sample)

    def move(self, index: int, sample: str, to: int) -> None:
        node = self.nodes[index]
        is_free = sample in node.engine.running and sample not in node.moves
        if index != to and is_free and node.destination.may_leave(sample, self.now):
            machine = self.make_source(
                f"m{self.now}", sample, source=node.incarnation, destination=self.nodes[to].incarnation,
                numbers=node.numbers,
            )  # fmt: skip
            node.moves[sample], node.targets[sample] = machine, to
            node.steps[sample] = deque(machine.start())
            self.go_on(node, sample)

    def say(self, node: Node, sample: str, event: ours.Event) -> None:
        if machine := node.moves.get(sample):
            node.steps[sample].extend(machine.on(event, self.now))
            self.go_on(node, sample)

    def go_on(self, node: Node, sample: str) -> None:
        steps = node.steps[sample]
        while steps:
            event = self.perform(node, sample, steps.popleft())
            if sample not in node.moves:
                return
            if event is not None:
                steps.extend(node.moves[sample].on(event, self.now))

    def perform(self, node: Node, sample: str, action: ours.Action) -> ours.Event | None:
        engine, to = node.engine, node.targets[sample]
        match action:
            case ours.Describe():
                if sample not in engine.running:
                    return ours.Failed("finished", "")
                node.epochs[sample] = engine.epochs[sample]
                return ours.Described(b"", engine.version, True)
            case ours.Tell(message) | ours.Notify(message):
                self.told.append((self.now + MESSAGE_SECONDS, to, node.index, message))
                return None
            case ours.Pack() | ours.Detach():
                if sample not in engine.running:
                    return ours.Failed("finished", "")
                if engine.epochs[sample] != node.epochs[sample]:
                    return ours.Failed("epoch", "")
                if isinstance(action, ours.Pack):
                    return ours.PackedKV(b"kv", b"mark", 1, is_last=len(self.told) % 2 == 0)
                engine.running.remove(sample)
                engine.away.add(sample)
                return ours.Detached(b"state", b"kv", 1, b"prompt", "token")
            case ours.Wait(seconds):
                node.waits[sample] = self.now + seconds
            case ours.Reattach():
                engine.away.remove(sample)
                engine.running.add(sample)
            case ours.LetGo():
                engine.cancel(sample)
                node.keeps.discard(sample)
            case ours.MoveEnd(how):
                self.ends.append(how)
                del node.moves[sample], node.steps[sample]
                node.waits.pop(sample, None)
        return None

    def deliver(self, at: int, *, keep: bool = False) -> None:
        """Deliver one message in flight; with `keep` a copy stays."""
        if not self.told:
            return
        until, to, back, message = self.told[at % len(self.told)]
        node = self.nodes[to]
        if any(work.sample == message.sample for work in node.work):
            return  # messages of one sample come one after the other
        if not keep:
            self.told.remove((until, to, back, message))
        if not self.act(node, node.destination.arrived(message, self.now), back):
            node.work.append(message)
            if isinstance(message, messages.HandOver):  # kept in progress before it runs
                node.has_own |= {message.sample} & node.keeps
                node.keeps.add(message.sample)

    def act(self, node: Node, judgement: Judgement, back: int) -> bool:
        self.free(node, judgement.freed)
        if judgement.reply is not None:
            self.replies.append((self.now + MESSAGE_SECONDS, back, judgement.reply))
        return judgement.reply is not None

    def free(self, node: Node, samples: list[str]) -> None:
        for sample in samples:
            assert sample in node.engine.arriving, "only what is kept is freed"
            node.engine.cancel(sample)

    def work(self, index: int) -> None:
        node = self.nodes[index]
        if not node.work:
            return
        message, engine = node.work.pop(0), node.engine
        sample = message.sample
        refusal: tuple[str, str] | None = None
        match message:
            case messages.Reserve():
                if engine.knows(sample):
                    refusal = ("id", "known")
                elif message.has_kv and message.weights_version != engine.version:
                    refusal = ("weights_version", "")
                elif message.has_kv:
                    engine.arriving.add(sample)
            case messages.Range() if sample in engine.dropped:
                refusal = ("reservation", "")
            case messages.HandOver():
                has_own = sample in node.has_own
                node.has_own.discard(sample)
                if has_own:
                    refusal = ("id", "known")
                else:
                    engine.cancel(sample)
                    engine.running.add(sample)
                    engine.epochs[sample] = engine.epochs.get(sample, 0) + 1
        back = next((other.index for other in self.nodes if other.incarnation == message.source), 0)
        assert self.act(node, node.destination.done(message, self.now, refusal), back)

    def reply(self, at: int, *, keep: bool = False) -> None:
        if not self.replies:
            return
        until, to, reply = self.replies[at % len(self.replies)]
        if not keep:
            self.replies.remove((until, to, reply))
        if self.nodes[to].incarnation == reply.source:
            self.say(self.nodes[to], reply.sample, ours.Heard(reply))

    def lose(self, at: int) -> None:
        for way in (self.told, self.replies):
            if way:
                way.pop(at % len(way))

    def silence(self, index: int) -> None:
        for sample in list(self.nodes[index].moves):
            self.say(self.nodes[index], sample, ours.Silence())

    def give_up(self, index: int) -> None:
        for sample in list(self.nodes[index].moves):
            self.say(self.nodes[index], sample, ours.GiveUp("leaving"))

    def preempt(self, index: int) -> None:
        for sample in self.nodes[index].engine.running:
            self.nodes[index].engine.epochs[sample] += 1

    def swap(self, index: int) -> None:
        engine = self.nodes[index].engine
        engine.version += 1
        engine.dropped |= engine.arriving
        self.preempt(index)

    def finish(self, index: int) -> None:
        node = self.nodes[index]
        for sample in sorted(node.engine.running)[:1]:
            node.engine.cancel(sample)
            node.keeps.discard(sample)
            self.finished.add(sample)

    def crash(self, index: int) -> None:
        self.num_crashes += 1
        self.nodes[index] = self.node(index)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.told = [each for each in self.told if each[0] > self.now]
        self.replies = [each for each in self.replies if each[0] > self.now]
        for node in self.nodes:
            self.free(node, node.destination.expire(self.now))
            for sample in [sample for sample, until in node.waits.items() if until <= self.now]:
                del node.waits[sample]
                self.say(node, sample, ours.SourceTick())
        for sample in self.samples:
            if sample in self.finished or any(sample in node.keeps for node in self.nodes):
                self.alone_since[sample] = self.now
            elif self.now - self.alone_since[sample] >= REDELIVERY_SECONDS:
                self.give(sample, int(self.now) % NODES)
                self.alone_since[sample] = self.now

    def check(self) -> None:
        for sample in self.samples:
            runs = [node for node in self.nodes if sample in node.engine.running]
            assert len(runs) <= 1, f"{sample} runs at {[node.incarnation for node in runs]}"
            assert all(sample in node.keeps for node in runs), f"{sample} runs and nobody keeps its prompt"

    def settle(self) -> None:
        for second in range(300):
            for _ in range(200):
                if not self.told and not self.replies and not any(node.work for node in self.nodes):
                    break
                for index in range(NODES):
                    self.work(index)
                self.deliver(0)
                self.reply(0)
                self.check()
            for index in range(NODES) if second % 5 == 0 else ():
                self.silence(index)
            self.advance(0.5)
            self.check()
        for node in self.nodes:
            assert not node.moves, "a move without an end"
            assert not node.engine.away, "stands still for ever"
            assert not node.engine.arriving, "kept for ever"
            assert not node.destination.arriving, "a lease for ever"
            assert node.keeps == node.engine.running, "a prompt in progress that nobody runs"
        for sample in set(self.samples) - self.finished:
            assert sum(sample in node.engine.running for node in self.nodes) == 1, f"{sample} is nowhere"


def any_of(rng: Random, world: World) -> None:
    index, at = rng.randrange(NODES), rng.randrange(8)
    happenings: list[tuple[int, Callable[[], None]]] = [
        (8, lambda: world.move(index, rng.choice(world.samples), rng.randrange(NODES))),
        (12, lambda: world.deliver(at)),
        (12, lambda: world.work(index)),
        (12, lambda: world.reply(at)),
        (2, lambda: world.deliver(at, keep=True)),
        (1, lambda: world.reply(at, keep=True)),
        (1, lambda: world.lose(at)),
        (2, lambda: world.silence(index)),
        (1, lambda: world.give_up(index)),
        (1, lambda: world.preempt(index)),
        (1, lambda: world.swap(index)),
        (1, lambda: world.finish(index) if rng.random() < 0.2 else None),
        (1, lambda: world.crash(index)),
        (3, lambda: world.advance(rng.choice([0.6, 0.6, 3.0, 16.0]))),
    ]
    rng.choices([each for _, each in happenings], [weight for weight, _ in happenings])[0]()
    world.check()
