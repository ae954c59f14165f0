"""Triton's attention kernels compile for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from rlhfspec.kernels import kv_pack_triton, tree_attention_triton

def compile(kernel, constants, pointers, floats=()):
    kinds = {name: "constexpr" for name in constants} | pointers | {name: "fp32" for name in floats}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"])

index = {name: "*i32" for name in ("slots", "table_rows", "context_lens", "extra", "slot_table", "rows")}
stored = {name: "*bf16" for name in ("query", "key", "value", "kv", "out", "packed")} | {"sinks": "*fp32"}
stored["numbers"] = "*fp32"
shape = {"DIM": 128, "PADDED_DIM": 128, "BLOCK_SIZE": 16}
assert compile(tree_attention_triton._write_kv_kernel, shape, index | stored)
group = {"GROUP": 3, "PADDED_GROUP": 4, "PADDED_EXTRA": 8, "TILE": 16, "HAS_SOFTCAP": True, "HAS_SINKS": True}
for partial in (False, True):
    constants = shape | group | {"PARTIAL": partial}
    assert compile(tree_attention_triton._attention_kernel, constants, index | stored, ("scale", "softcap"))
merged = {"DIM": 72, "PADDED_DIM": 128, "HAS_SINKS": True}
assert compile(tree_attention_triton._merge_kernel, merged, index | stored)
assert compile(kv_pack_triton._copy_kernel, {"ROWS_PER_BLOCK": 16, "PIECE": 1024, "PACK": True}, index | stored)
"""


def test_triton_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts more than the compiler does; compiling needs no GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
