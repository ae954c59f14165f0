"""Script of test_engine_in_parts.py, once a rank, each part on its own device. argv: a folder of models."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import second_device
import torch.distributed as dist
import two_parts
from second_device import group
from two_devices import only_the_device

from rlhfspec.common.ranks.meeting import joined
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.forward.led import follow
from rlhfspec.engine.forward.models import make_runners
from rlhfspec.huggingface.cutting import load_part

ROOM_OF_ONE = 18 << 20  # bytes


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    second_device.load()
    group.register()
    only_the_device(rank)
    device = f"second:{rank}"
    with second_device.swapping(), joined(timeout_seconds=60.0, silence_seconds=60.0, device=device) as ranks:
        config = two_parts.config(device=device, speculation="suffix", max_sequences=64, max_context=512)
        part = load_part(folder / two_parts.DRIVEN, ranks)
        with second_device.limited(ROOM_OF_ONE) if rank else nullcontext():
            if rank:
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
