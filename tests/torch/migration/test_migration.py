"""Sequences that move during decode keep their bits and always have one owner."""

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from movers import LONG, TOKENS, all_bits, alone, generators
from moving import SUFFIX, TREE


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("kind", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("speculation", ["off", TREE, SUFFIX])
async def test_moved_while_both_decode_the_bits_are_those_of_one_engine(kind: str, speculation: Any) -> None:
    rng = np.random.default_rng(5)
    async with generators(kind=kind, **LONG | {"speculation": speculation}) as made:
        names = [str(seed) for seed in range(4)]
        for index, name in enumerate(names):
            await made[index % 2].submit(name, seed=index, max_tokens=TOKENS)
        moves = []
        while any(each.engine.has_work for each in made) and len(moves) < 12:
            here = made[int(rng.integers(2))]
            running = [name for name in names if name in here.custody.prompts]
            if running:
                moves.append(await here.move(str(rng.choice(running)), made[1 - made.index(here)]))
            await asyncio.sleep(0)
        for each in made:
            await each.until(lambda each=each: not each.engine.has_work)
    assert all_bits(made) == {name: alone(seed) for seed, name in enumerate(names)}
    hows = [moved.how for moved in moves]
    assert hows.count("kv") >= 3, moves
    assert all(moved.num_bytes > 0 for moved in moves if moved.how == "kv")


@pytest.mark.parametrize("speculation", ["off", SUFFIX])
async def test_how_far_a_sequence_is_both_ends_say_alike_and_in_order(speculation: Any) -> None:
    """Moving back and forth, counts of tokens, steps and moves only grow, to those of the finished sample."""

    async with generators(**LONG | {"speculation": speculation}) as made:
        await made[0].submit("x", seed=1, max_tokens=TOKENS)
        await made[0].until(lambda: made[0].steps)  # what waits has no KV to take along
        for turn in range(4):
            here, there = made[turn % 2], made[1 - turn % 2]
            await here.until(lambda here=here: "x" in here.custody.prompts)
            assert (await here.move("x", there)).how == "kv"
        for each in made:
            await each.until(lambda each=each: not each.engine.has_work)
    left = [made[turn % 2].custody.left_with["x"][turn // 2] for turn in range(4)]
    came = [made[1 - turn % 2].custody.came_with["x"][turn // 2] for turn in range(4)]
    assert [each._replace(at=0.0) for each in left] == [each._replace(at=0.0) for each in came]
    assert [each.num_moves for each in left] == [0, 1, 2, 3]
    assert all(before.at <= after.at for before, after in pairwise(left))
    lengths = [each.num_tokens for each in left]
    assert lengths == sorted(lengths)
    done = made[0].finished["x"]
    steps = [dict(each.strategies) for each in left] + [dict(done.stats.strategies)]
    assert all(now[name] >= then for before, now in pairwise(steps) for name, then in before.items())
    assert left[-1].num_verifications <= done.stats.num_verifications
    assert done.stats.num_moves == 4
