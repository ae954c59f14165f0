import subprocess
import sys
from pathlib import Path

import pytest
from reward_desks import HANG, Desk, sample


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_hanging_function_keeps_no_process_alive(desk: Desk) -> None:
    desk.write(HANG)
    code = f"""
import asyncio, pathlib
from rlhfspec.errors import RewardError
from rlhfspec.job.rewards import Rewards
from rlhfspec.training.scoring.rewards import RewardSources
from rlhfspec.messages.records import Sample
source = {{"type": "function", "function": "rewards:reward", "timeoutSeconds": 0.05, "retries": 0}}
sources = RewardSources(Rewards.model_validate({{"sources": [source]}}), pathlib.Path({str(desk.folder)!r}))
try:
    asyncio.run(sources.score_many([{sample()!r}]))
except RewardError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "reward 'reward' of sample sums/1/0/0: it gave no answer within 0.05 s\n"
