"""Trial of moves: three generators, a move every 50 ms, and kills, holds and link faults during moves."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from advice import Adviser
from runs import train

from faults import processes
from faults.harness import Disturbed, FaultyRun
from faults.links import SLOW_BYTES_A_SECOND, LinkProxy
from faults.schedule import SUPERVISOR, Fault, Kind
from faults.trial import OVERRIDES, again, check, written

NUM_GENERATORS = 3
ENDS = ("source", "destination")  # of the move at hand
FRESH_SECONDS = 0.1  # a move that was advised longer ago is over
LEAST_MOVES = 5  # that bring their KV, in a run: most advice is about somebody who was just struck
NO_MOVE_SECONDS = 5.0  # then a generator is struck without one
LONG = ("generation.maxTokens=256", "generation.ignoreEos=true", "generation.kvCacheTokens=65536")
LONG += (f"roles.generator.workers={NUM_GENERATORS}", "roles.reward.workers=1")
# Of those struck by a kill, by weight; beside the kills, of every ten faults one hold and, over TCP, one of the link.
KILLED = {"source": 30, "destination": 30, "generator": 8, "rebalancer-0": 12, SUPERVISOR: 1, "nats": 5, "redis": 2,
          "guardian": 2, "launcher": 2, "trainer-0": 3, "reward-0": 2, "prompts-0": 1}  # fmt: skip
LINK_FAULTS: tuple[Kind, ...] = ("cut", "slow", "break", "corrupt")
MOST_IN_A_WAVE = 6


def link_of(seed: int) -> str:
    return "tcp" if seed % 2 else "shm"


def schedule(seed: int, num_kills: int, *, most_held_seconds: float) -> list[Fault]:
    draw = random.Random(f"moves {seed}")
    faults: list[Fault] = []
    step, left = 1, num_kills
    leaves_at = draw.randrange(num_kills)
    while left:
        for _ in range(draw.randint(1, MOST_IN_A_WAVE)):
            delay, kind = round(draw.uniform(0.0, 0.6), 2), draw.random()
            if kind < 0.1:
                held = round(draw.uniform(0.3, most_held_seconds), 1)
                faults.append(Fault(step, delay, "hold", draw.choice([*ENDS, "rebalancer-0"]), held))
            elif kind < 0.2 and link_of(seed) == "tcp":
                faults.append(Fault(step, delay, draw.choice(LINK_FAULTS), "link", round(draw.uniform(0.3, 6.0), 1)))
            elif left:
                if left == leaves_at:
                    faults.append(Fault(step, delay, "leave", ENDS[0]))
                target = draw.choices([*KILLED], [*KILLED.values()])[0]
                if target == "generator":
                    target = f"generator-{draw.randrange(NUM_GENERATORS)}"
                faults.append(Fault(step, delay, "kill", target))
                left -= 1
        step += 1
    return faults


class MovingRun(FaultyRun):
    def __init__(self, *arguments: Any, seed: int, adviser: Adviser, proxy: LinkProxy) -> None:
        super().__init__(*arguments)
        self.environment = proxy.environment
        self.in_a_move: list[tuple[str, str]] = []  # who was struck how, in which move
        self._adviser, self._proxy = adviser, proxy
        self.quiet_seconds = 100.0
        self._draw = random.Random(seed)
        self._link_heals_at = float("inf")

    def _strike(self, fault: Fault) -> None:
        if fault.target in ENDS:
            self._strike_an_end(fault)
        elif fault.target == "link":
            self._strike_the_link(fault)
        else:
            super()._strike(fault)

    def _strike_an_end(self, fault: Fault) -> None:
        found: dict[int, list[int]] = {}

        def are_there() -> bool:
            uid = self._uid()
            found.clear()
            for worker in range(NUM_GENERATORS) if uid else ():
                if pids := processes.named(uid or "", f"generator-{worker}"):
                    found[worker] = pids
            return len(found) > 1

        self.until(are_there, "there are two generators")
        end, fresh = time.monotonic() + NO_MOVE_SECONDS, None

        def is_advised() -> bool:
            """Return at once whether a move is advised, as it may be over a moment later."""
            nonlocal fresh
            fresh = self._fresh_move()
            return fresh is not None or time.monotonic() > end

        self.until(is_advised, "a move is advised")
        worker = self._draw.choice(sorted(found))
        if fresh is not None:
            id, ends = fresh
            worker = ends[ENDS.index(fault.target)]
            time.sleep(self._draw.uniform(0.0, 0.04))
            self.in_a_move.append((f"{fault.kind} {fault.target}", id))
        self._send(fault, found.get(worker, []))
        self._tell(fault, f"generator-{worker}, {'no move' if fresh is None else fresh[0]}")

    def _fresh_move(self) -> tuple[str, tuple[int, int]] | None:
        for at, move in reversed(list(self._adviser.under_way.values())):
            if time.monotonic() - at < FRESH_SECONDS:
                return move.id, (move.source, move.destination)
        return None

    def _strike_the_link(self, fault: Fault) -> None:
        match fault.kind:
            case "cut":
                self._proxy.cut()
                self._link_heals_at = time.monotonic() + fault.seconds
            case "slow":
                self._proxy.bytes_a_second = SLOW_BYTES_A_SECOND
                self._link_heals_at = time.monotonic() + fault.seconds
            case "corrupt":
                self._proxy.corrupts = True
                self._link_heals_at = time.monotonic() + fault.seconds
            case _:
                self._proxy.break_off()
        self._tell(fault, f"{self._proxy.num_connections} connections so far")

    def _let_go(self, now: float) -> None:
        super()._let_go(now)
        if now >= self._link_heals_at:
            self._link_heals_at = float("inf")
            self._proxy.bytes_a_second = float("inf")
            self._proxy.corrupts = False
            self._proxy.heal()


def trial(folder: Path, seed: int, num_kills: int, say: Callable[[str], None], *, held_seconds: float) -> MovingRun:
    """Run a trial. Raise `Disturbed` with the seed and the command to repeat it."""
    faults = schedule(seed, num_kills, most_held_seconds=held_seconds)
    with again(seed, f"--moves --kills {num_kills} --held-seconds {held_seconds:g}"):
        return _trial(folder, seed, faults, say)


def _trial(folder: Path, seed: int, faults: Sequence[Fault], say: Callable[[str], None]) -> MovingRun:
    """Run until all faults struck, then interrupt in mid-step, so that all generators leave at once."""
    job = written(folder, name="grpo")
    overrides = [*OVERRIDES, *LONG, f"roles.generator.link={link_of(seed)}"]
    out = folder / "faults"
    with LinkProxy() as proxy, Adviser(out / "processes" / "connections.json", seed) as adviser:
        arguments = (job, out, [*overrides, "training.steps=100000"], say)
        run = MovingRun(*arguments, seed=seed, adviser=adviser, proxy=proxy)
        with run.started():
            run.strike_and_interrupt(faults)
    say(f"  {run.num_steps} steps; moves by {link_of(seed)}: {dict(adviser.outcomes)} of {adviser.num_advised} advised")
    if link_of(seed) == "tcp":
        say(f"  {proxy.num_connections} connections, {proxy.num_corrupted} pieces with a bit changed")
    say(f"  faults in a move: {len(run.in_a_move)}")
    if adviser.outcomes["kv"] < LEAST_MOVES:
        raise Disturbed(f"moves: {adviser.outcomes}; the last: {adviser.moved[-3:]}")
    check(job, train(job, "undisturbed", *overrides, f"training.steps={run.num_steps}"))
    _check_logs(out, say)
    return run


def _check_logs(out: Path, say: Callable[[str], None]) -> None:
    texts = [file.read_text(errors="replace") for file in sorted((out / "logs").glob("generator-*.jsonl*"))]
    left = sum(text.count('"left: of') for text in texts)
    say(f"  generators that left, and nothing of moves in their engines: {left}")
    for text in texts:
        for line in text.splitlines():
            if "Traceback" in line or "leaked" in line or "was never retrieved" in line:
                raise Disturbed(f"a generator said: {line[:3000]}")
    if not left:
        raise Disturbed("no generator left in good order")
