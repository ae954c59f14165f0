import os
import subprocess
import sys

import pytest

COMPILE_LAW = """
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
"""


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from rlhfspec.kernels import few_bit_linear_triton, kv_pack_triton, tree_attention_triton

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
flags = {"BLOCK_SIZE": 16, "PADDED_EXTRA": 8, "HAS_SOFTCAP": True, "HAS_SINKS": True}
for partial in (False, True):
    constants = flags | tree_attention_triton.tiles(3, 72) | {"PARTIAL": partial}
    assert compile(tree_attention_triton._attention_kernel, constants, index | stored, ("scale", "softcap"))
merged = {"DIM": 72, "PADDED_DIM": 128, "HAS_SINKS": True}
assert compile(tree_attention_triton._merge_kernel, merged, index | stored)
layer = {"weight": "*bf16", "numbers": "*i16", "scales": "*i32"}
for words in (16, 32):
    constants = {"WORDS": words, "OUTPUTS": few_bit_linear_triton.OUTPUTS}
    assert compile(few_bit_linear_triton._quantise_kernel, constants, layer)
assert compile(kv_pack_triton._copy_kernel, {"ROWS_PER_BLOCK": 16, "PIECE": 1024, "PACK": True}, index | stored)
"""

# What the assembler made of the kernel: registers, bytes spilled, and how many instructions are matrix products.
READ = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget

def read(kernel, constants, kinds, even, options):
    # `even`: what a launch finds of its arguments: addresses and strides of tensors are multiples of 16.
    kinds |= {name: "constexpr" for name in constants}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
                       for flag in ("-res-usage", "-sass"))
    print(*re.search(r"REG:(\\d+) STACK:(\\d+)", usage).groups(),
          len(re.findall(r"\\b(?:HMMA|HGMMA|UTCHMMA)\\b", code)),
          len(re.findall(r"\\bLDGSTS\\S*\\.128|\\bLDG\\S*\\.128", code)), compiled.metadata.shared)

capability, *tile = map(int, sys.argv[1:])
"""

READ_ATTENTION = """
from rlhfspec.kernels import tree_attention_triton
flags = {"BLOCK_SIZE": 16, "PADDED_EXTRA": 8, "HAS_SOFTCAP": False, "HAS_SINKS": False, "PARTIAL": False}
constants = flags | tree_attention_triton.tiles(*tile)
kinds = {name: "*i32" for name in ("table_rows", "context_lens", "extra", "slot_table")}
kinds |= {name: "*bf16" for name in ("query", "kv", "out")} | {name: "*fp32" for name in ("numbers", "sinks")}
kinds |= {"scale": "fp32", "softcap": "fp32"}
even = ["query", "kv", "out", "slot_table", "query_row", "query_head", "block_stride", "plane", "first"]
read(tree_attention_triton._attention_kernel, constants, kinds, even, {"num_warps": tree_attention_triton.WARPS})
"""

READ_FEW_BITS = """
from rlhfspec.kernels import few_bit_linear_triton
bits, rows = tile
constants = {"WORDS": 4 * bits, "OUTPUTS": few_bit_linear_triton.OUTPUTS, "ROWS": rows}
constants |= {"HAS_BIAS": True, "IS_PART": bits == 4, "HAS_ASSEMBLY": True}
kinds = {name: "*bf16" for name in ("rows", "bias", "out")}
kinds |= {"numbers": "*i16", "scales": "*i32", "parts": "*fp32", "arrived": "*i32"}
even = ["rows", "numbers", "scales", "out", "parts", "num_outputs"]
read(few_bit_linear_triton._product_kernel, constants, kinds, even, few_bit_linear_triton.launch(rows))
"""


def read(code: str, *words: int) -> list[int]:
    """Return registers, spilled bytes, matrix products, loads of 16 bytes, and shared memory of a compiled kernel."""
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-c", READ + code, *map(str, words)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(word) for word in done.stdout.split()]


@pytest.mark.whole("kernels are compiled for three kinds of GPU")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("group", "dim", "most_registers"), [(4, 128, 240), (7, 128, 240), (8, 256, 170)], ids=["8B", "7B", "wide"]
)
def test_attention_uses_tensor_cores_without_spills(capability: int, group: int, dim: int, most_registers: int) -> None:
    registers, spilled, products, wide_loads, shared = read(READ_ATTENTION, capability, group, dim)
    assert spilled == 0
    assert registers <= most_registers
    assert products > 0
    assert wide_loads > 0, "a key is loaded 16 bytes at a time"
    assert shared <= 100_000, "two programs fit on one multiprocessor of an H100, and one on any"


@pytest.mark.whole("kernels are compiled for three kinds of GPU")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_in_few_bits_use_tensor_cores_without_spills(capability: int, rows: int, bits: int) -> None:
    registers, spilled, products, wide_loads, shared = read(READ_FEW_BITS, capability, bits, rows)
    assert spilled == 0
    assert registers <= 128
    assert products > 0
    assert wide_loads > 0, "numbers are loaded 16 bytes at a time"
    assert shared <= 75_000, "three programs fit on one multiprocessor of an H100"


@pytest.mark.parametrize("code", [COMPILE_LAW, COMPILE], ids=["the law", "attention and packing"])
def test_triton_kernels_compile_for_a_gpu(code: str) -> None:
    """The interpreter accepts more than the compiler does."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
