"""Script of test_engine_in_parts.py, once a rank, each part on its own device. argv: a folder of models."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import second_device
import torch.distributed as dist
import two_parts
from two_devices import joined_on_devices

from rlhfspec.engine.core import make_engine
from rlhfspec.engine.forward.led import follow
from rlhfspec.engine.forward.models import make_runners
from rlhfspec.huggingface.cutting import load_part

ROOM_OF_ONE = 18 << 20  # bytes


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with joined_on_devices() as (ranks, device):
        config = two_parts.config(device=device, speculation="suffix", max_sequences=64, max_context=512)
        part = load_part(folder / two_parts.DRIVEN, ranks)
        with second_device.limited(ROOM_OF_ONE) if ranks.rank else nullcontext():
            if ranks.rank:
                _, [runner] = make_runners(part, config, None, ranks)
                (folder / "blocks-1").write_text(str(len(runner.kv)))
                follow(runner, ranks)
            else:
                engine = make_engine(part, config, group=ranks)
                (folder / "blocks-0").write_text(str(engine.stats().num_blocks))
                found = two_parts.run(engine, two_parts.requests(), disturbed=True)
                (folder / "on-devices.json").write_text(json.dumps(found))
                engine.close()
        dist.barrier(group=ranks.host)
