import subprocess
import sys


def test_a_view_ends_when_its_reader_is_gone() -> None:
    code = """
import asyncio, sys, threading
from rlhfspec.control import show
show._NO_READER_SECONDS = 0.2
threading.Thread(daemon=True, target=sys.stdout.write, args=("x" * (1 << 20),)).start()
asyncio.run(show._end_when_nobody_reads(asyncio.Event()))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.wait(timeout=60) == 0
