import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


@pytest.mark.parametrize("source", PROTOS, ids=lambda source: source.stem)
def test_generated_code_is_what_the_proto_says(source: Path, tmp_path: Path) -> None:
    assert importlib.util.find_spec("grpc_tools"), "grpcio-tools is part of the development environment"
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *out, str(source.relative_to(ROOT))]
    subprocess.run(command, cwd=ROOT, check=True)
    made = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 2
    for path in made:
        assert path.read_text() == (ROOT / "libs" / path.relative_to(tmp_path)).read_text(), "run: make protos"
