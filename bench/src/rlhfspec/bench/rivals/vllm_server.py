"""vLLM's own OpenAI server, which ends with the process that holds its standard input. Run by the Python with vLLM."""

from __future__ import annotations

import os
import signal
import threading


def _end_with_the_input() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
