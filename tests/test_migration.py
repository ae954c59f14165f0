"""Sequences that move between generators while both decode: the same bits, and always one owner."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from movers import LONG, TOKENS, all_bits, alone, generators
from moving import SUFFIX, TREE


@pytest.mark.parametrize("kind", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("speculation", ["off", TREE, SUFFIX])
def test_moved_while_both_decode_the_bits_are_those_of_one_engine(kind: str, speculation: Any) -> None:
    async def main() -> None:
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

    asyncio.run(main())
