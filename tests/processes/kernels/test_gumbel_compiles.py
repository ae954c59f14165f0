"""Triton's kernels of the law compile for an absent GPU."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rlhfspec.kernels import gumbel_triton

def compiled(kernel, types, constants):
    signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=places), target=target)

common = ["*fp32", "i64", "i32", "*i64", "*i32", "*fp32"]
compiled(gumbel_triton._sample_kernel, common + ["*i32", "*fp32", "*i32", "*fp32", "*fp32", "*i8"], {"TILE": 1024})
compiled(gumbel_triton._candidates_kernel, common + ["*i32", "*fp32"], {"NUM": 5, "SLOTS": 8, "TILE": 1024})
logits = ["*fp32", "i64", "i32"]
compiled(gumbel_triton._log_probs_kernel, logits + ["*i32", "*fp32", "*fp32"], {"TILE": 1024})
print("compiled")
"""


def test_triton_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts what the compiler does not."""
    pytest.importorskip("triton", reason="no triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr
