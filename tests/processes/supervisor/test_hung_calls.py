"""A hanging call, and its process."""

import subprocess
import sys


def test_a_hung_call_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from rlhfspec.stage.threads import ComputeThread\n"
        "async def main():\n"
        "    begun = threading.Event()\n"
        "    hang = lambda: (begun.set(), threading.Event().wait())\n"
        "    call = asyncio.create_task(ComputeThread('x').in_thread(hang))\n"
        "    while not begun.is_set(): await asyncio.sleep(0)\n"
        "    call.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
