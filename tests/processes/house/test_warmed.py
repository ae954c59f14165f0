import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warmed

ABOUT = """
import json, os, sys
from pathlib import Path
print(json.dumps({
    "arguments": sys.argv, "command": Path("/proc/self/cmdline").read_text().rstrip("\\0").split("\\0"),
    "environment": sorted(filter(None, Path("/proc/self/environ").read_text().split("\\0"))), "folder": os.getcwd(),
    "here": sorted(f"{name}={value}" for name, value in os.environ.items()), "stdin": sys.stdin.read(),
    "parent": os.getppid(), "is warm": "torch" in sys.modules, "name": __name__,
    "handles": [n for n in map(int, os.listdir("/proc/self/fd")) if n < 500 and os.path.exists(f"/proc/self/fd/{n}")],
}))
"""
STARTS = f"""
import asyncio, os, sys
async def main(environment):
    command = [sys.executable, "-c", {ABOUT!r}, "of", "another"]
    process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, env=environment)
    output, _ = await process.communicate(b"hello")
    print(output.decode(), process.returncode, os.getpid())
asyncio.run(main(ENVIRONMENT))
"""


def about(command: list[str], **options: Any) -> dict[str, Any]:
    process = warmed.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    output, _ = process.communicate(b"hello")
    assert process.returncode == 0
    return dict(json.loads(output))


def told(environment: dict[str, str]) -> list[str]:
    return sorted(f"{name}={value}" for name, value in environment.items())


def test_it_is_told_what_the_command_says(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RLHFSPEC_RUN": "ü f"}
    command = [sys.executable, "-c", ABOUT, "one", "two words"]
    with (tmp_path / "lock").open("w") as lock:
        seen = about(command, cwd=tmp_path, env=environment, pass_fds=[lock.fileno()])
        assert {0, 1, 2, lock.fileno()} <= set(seen["handles"])
        assert len(seen["handles"]) <= 5, "those, and the folder that it lists"
    assert seen["is warm"]
    assert (seen["arguments"], seen["command"]) == (["-c", "one", "two words"], command)
    assert seen["environment"] == seen["here"] == told(environment)
    assert (seen["folder"], seen["parent"], seen["stdin"]) == (str(tmp_path), os.getpid(), "hello")
    assert seen["name"] == "__main__"


@pytest.mark.parametrize(("given", "warm"), [("os.environ | {'A': 'b'}", True), ("{'A': 'b'}", False)])
def test_what_it_starts_is_its_child(given: str, warm: bool) -> None:
    """A process that it starts is warm too, unless its environment has other variables that imports read."""
    command = [sys.executable, "-c", STARTS.replace("ENVIRONMENT", given)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = warmed.run(command, capture_output=True, env=environment, text=True)
    said, code, pid = done.stdout.rsplit(maxsplit=2)
    seen = json.loads(said)
    assert (seen["is warm"], code, seen["parent"]) == (warm, "0", int(pid)), done.stderr
    assert "A=b" in seen["environment"]
    assert seen["arguments"] == ["-c", "of", "another"]


@pytest.mark.parametrize("code", ["import sys; sys.exit(7)", "import os; os.kill(os.getpid(), 9)"])
def test_it_ends_as_the_process_would(code: str) -> None:
    done = warmed.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == (7 if "exit" in code else -9)


@pytest.mark.parametrize("variable", ["PYTHONUTF8", "OMP_NUM_THREADS", "LC_ALL", "TRITON_INTERPRET"])
def test_what_imports_read_makes_it_a_process_as_usual(variable: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | {variable: "0" if variable != "LC_ALL" else "C.UTF-8"}
    assert not about([sys.executable, "-c", ABOUT], env=environment)["is warm"]
