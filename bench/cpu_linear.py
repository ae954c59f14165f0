"""Compare the packed gated-MLP kernels with torch and oneDNN in milliseconds per pass.

python bench/cpu_linear.py [--layers 4] [--hidden 256] [--intermediate 24576] [--repeats 15] [--rows 1,8,64]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhfspec.kernels import linear as ours
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.malloc import tune_malloc

Mode = Callable[[Tensor], Tensor]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}


def make_layers(args: argparse.Namespace) -> list[tuple[nn.Linear, nn.Linear, nn.Linear]]:
    shapes = [(args.hidden, args.intermediate)] * 2 + [(args.intermediate, args.hidden)]
    return [tuple(nn.Linear(*shape, bias=False) for shape in shapes) for _ in range(args.layers)]  # type: ignore[misc]


def our_mode(layers: list[tuple[nn.Linear, nn.Linear, nn.Linear]], arithmetic: str, dtype: torch.dtype) -> Mode:
    packed = [
        ours.PackedGatedMLP.from_linears(*layer, activation="silu", dtype=dtype, arithmetic=arithmetic)
        for layer in layers
    ]

    def run(x: Tensor) -> Tensor:
        for mlp in packed:
            x = x + mlp(x)
        return x

    return run


def torch_mode(layers: list[tuple[nn.Linear, nn.Linear, nn.Linear]]) -> Mode:
    weights = [[linear.weight.detach().to(torch.bfloat16) for linear in layer] for layer in layers]

    def run(x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        for gate, up, down in weights:
            hidden = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
            x = x + functional.linear(hidden, down)
        return x

    return run


def onednn_mode(layers: list[tuple[nn.Linear, nn.Linear, nn.Linear]]) -> Mode:
    """Return a mode that runs oneDNN as CPU servers do: weights prepacked, the activation fused into the gate."""
    reorder, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    weights = [[reorder(linear.weight.detach().to(torch.bfloat16)) for linear in layer] for layer in layers]

    def run(x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        for gate, up, down in weights:
            hidden = multiply(x, gate, None, "swish", [], "") * multiply(x, up, None, "none", [], "")
            x = x + multiply(hidden, down, None, "none", [], "")
        return x

    return run


def medians(modes: dict[str, Mode], x: Tensor, repeats: int, clock: Clock) -> dict[str, tuple[float, float]]:
    """Return the (median, minimum) milliseconds of each mode; the modes take turns."""
    times: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(repeats + 1):
        for name, run in modes.items():
            start = clock()
            run(x)
            times[name].append((clock() - start) * 1e3)
    return {name: (statistics.median(values[1:]), min(values[1:])) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=24576)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--modes", default="", help="only these, comma-separated")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: this thread's own time, on a busy machine"
    )
    args = parser.parse_args()
    tune_malloc()
    torch.manual_seed(0)
    layers = make_layers(args)
    modes: dict[str, Mode] = {
        f"bf16 {name}": our_mode(layers, name, torch.bfloat16)
        for name in ours.available_arithmetics(torch.bfloat16)
        if name != "torch"
    }
    modes["fp32 fma"] = our_mode(layers, "auto", torch.float32)
    modes["torch bf16"] = torch_mode(layers)
    modes["onednn bf16"] = onednn_mode(layers)
    if args.modes:
        modes = {name: modes[name] for name in args.modes.split(",")}
    print(f"{build.cpu_name()}, isa {build.best_isa()}; {args.layers} x ({args.hidden} <-> {args.intermediate})")
    print("ms per pass, median (minimum)")
    print(f"{'threads':>7} {'rows':>5} " + " ".join(f"{name:>17}" for name in modes))
    with torch.inference_mode():
        for threads in map(int, args.threads.split(",")):
            torch.set_num_threads(threads)
            for rows in map(int, args.rows.split(",")):
                result = medians(modes, torch.randn(rows, args.hidden), args.repeats, CLOCKS[args.clock])
                cells = " ".join(f"{f'{median:.1f} ({least:.1f})':>17}" for median, least in result.values())
                print(f"{threads:>7} {rows:>5} {cells}", flush=True)


if __name__ == "__main__":
    main()
