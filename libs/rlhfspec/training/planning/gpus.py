"""GPUs by name, and how long a version of the weights takes.

Example:
    >>> memory_of("h100"), memory_of("96")
    (80000000000, 96000000000)
    >>> [f"{way} {seconds:.0f} s" for way, seconds in weights_seconds(16_060_000_000)]
    ['file 32 s', 'grpc 58 s']
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfspec.errors import InvalidRequest, did_you_mean

# GB as the vendors say it; what a driver reports is a few percent more, which is left to it and to NCCL.
KNOWN = {
    "a10g": 24, "l4": 24, "v100": 32, "a100-40gb": 40, "l40s": 48, "a100": 80, "h100": 80, "h200": 141, "b200": 180,
    "mi300x": 192,
}  # fmt: skip
# GB/s of the trainer that puts a version, and of each that gets it: docs/weights.md, measured on CPUs
RATES = {"file": (1.45, 0.78), "grpc": (1.66, 0.33)}


def memory_of(given: str) -> int:
    """Bytes of a GPU, by its name or as a number of GB."""
    number = given.strip().lower().removesuffix("gb")
    if number.replace(".", "", 1).isdecimal() and float(number) > 0:
        return int(float(number) * 10**9)
    if given.lower() not in KNOWN:
        hint = did_you_mean(given.lower(), KNOWN)
        raise InvalidRequest("--gpu-memory", given, f"must be a number of GB or one of {', '.join(KNOWN)}{hint}")
    return KNOWN[given.lower()] * 10**9


def weights_seconds(num_bytes: int) -> Iterator[tuple[str, float]]:
    """From the trainer's last update to all generators, by each way: receivers pass on what they get as it comes."""
    for way, (put, get) in RATES.items():
        yield way, num_bytes / put / 1e9 + num_bytes / get / 1e9
