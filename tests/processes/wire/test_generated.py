"""The generated code of the wire format is what its proto says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from places import ROOT


def test_generated_code_is_what_the_proto_says(tmp_path: Path) -> None:
    assert importlib.util.find_spec("grpc_tools"), "grpcio-tools is part of the development environment"
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    source = "protos/rlhfspec/messages/wire/records.proto"
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *out, source], cwd=ROOT, check=True)
    for name in ("records_pb2.py", "records_pb2.pyi"):
        made = (tmp_path / "rlhfspec" / "messages" / "wire" / name).read_text()
        assert made == (ROOT / "libs" / "rlhfspec" / "messages" / "wire" / name).read_text(), (
            "the command is in records.proto"
        )
