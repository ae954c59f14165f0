import asyncio
import json
import subprocess
import sys

import pytest
import warmed
from askers import asking
from movers import LONG, TOKENS, Generator, alone, assert_clean
from moving import make
from places import TESTS

from rlhfspec.messages.records import Moved
from rlhfspec.moves.migration import messages
from rlhfspec.moves.migration.base import Peer

ASK = messages.Ask(move="m", sample="x", number=1, source="s", destination="d")


QUESTIONED = messages.to_bytes(ASK)


THERE = """
import asyncio, json, sys
sys.path.insert(0, {tests!r})
from movers import Generator, assert_clean
from moving import bits, make
from askers import asking, served

async def main():
    with asking() as control:
        there = Generator("there", make(**{options!r}), control, kind={kind!r})
        async with served(there.mover.answer) as (peer, _):
            there.start()
            print(json.dumps([peer.address, there.peer.incarnation]), flush=True)
            await there.until(lambda: there.finished)
            print(json.dumps(bits(there.finished["x"])), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await there.mover.close()
            await there.stop()
    assert_clean(there)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_sequence_moves_between_two_processes_and_keeps_its_bits(kind: str) -> None:
    code = THERE.format(tests=str(TESTS), kind=kind, options=LONG)
    process = warmed.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process, process.stdin as stdin, process.stdout as stdout:
        try:
            address, incarnation = json.loads(stdout.readline())
            peer = Peer(name="there", address=address, incarnation=incarnation)
            moved = asyncio.run(moved_to(peer, kind))
            assert moved.how == "kv", moved
            assert moved.num_bytes > 0
            token_ids, log_probs, tempered, reason = json.loads(stdout.readline())
            assert (tuple(token_ids), tuple(log_probs), tuple(tempered), reason) == alone(3)
            stdin.write("\n")
            stdin.flush()
            assert process.wait(60) == 0
        finally:
            process.kill()


async def moved_to(peer: Peer, kind: str) -> Moved:
    with asking() as control:
        here = Generator("here", make(**LONG), control, kind=kind)
        here.start()
        await control.ask(peer, QUESTIONED)  # the way is open
        await here.submit("x", seed=3, max_tokens=TOKENS)
        await here.until(lambda: here.steps > 3)
        moved = await here.move("x", peer)
        await here.until(lambda: not here.engine.has_work)
        await here.mover.close()
        await here.stop()
    assert_clean(here)
    return moved
