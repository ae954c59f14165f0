"""Stand-ins for the CUDA libraries that torch's wheel is linked to: on a CPU they are loaded and never called.

3.6 GB less in an image. A stub has every symbol that torch looks for, under the version it looks for it by; a call
would return an error (100, no device), by which torch finds that there is no CUDA.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

_CUDA = re.compile(r"lib(cu|nv|nccl)")
_SYMBOL = re.compile(r"(nccl|cu|nv)")
_TEXT = re.compile(r"Error(String|Name)$")  # torch puts into its message what these say of the error


def build(libraries: Path, target: Path) -> list[Path]:
    """Writes a stub for each library of CUDA that one of `libraries` needs."""
    symbols: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for library in sorted(libraries.glob("*.so*")):
        _collect(library, symbols)
    return [_compile(name, by_version, target) for name, by_version in sorted(symbols.items())]


def _collect(library: Path, symbols: dict[str, dict[str, set[str]]]) -> None:
    """Adds to {needed library: {version or "": symbols}}."""
    needed = [name for name in re.findall(r"NEEDED.*\[(.+?)\]", _readelf("-d", library)) if _CUDA.match(name)]
    owner: dict[str, str] = {}
    file = ""
    for line in _readelf("-V", library).splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif (found := re.search(r"Name: (\S+)", line)) and file in needed:
            owner[found[1]] = file
    unversioned = [name for name in needed if name not in owner.values()]
    for name in needed:
        symbols[name]  # even one of which nothing is used must be there
    for found in re.finditer(r" UND ([\w]+)(?:@(\S+))?", _readelf("--dyn-syms", library)):
        if found[2] in owner:
            symbols[owner[found[2]]][found[2]].add(found[1])
        elif found[2] is None and _SYMBOL.match(found[1]):
            for name in unversioned:  # nothing says whose it is, and it need not be known
                symbols[name][""].add(found[1])


def _compile(name: str, by_version: dict[str, set[str]], target: Path) -> Path:
    every = sorted(set().union(*by_version.values()))
    source = target / f"{name}.c"
    source.write_text("\n".join(map(_function, every)))
    command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(target / name), str(source)]
    if versions := [version for version in by_version if version]:
        script = target / f"{name}.map"
        script.write_text(
            "\n".join(f"{each} {{ global: {' '.join(f'{s};' for s in by_version[each])} }};" for each in versions)
        )
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)
    return target / name


def _function(symbol: str) -> str:
    if _TEXT.search(symbol):
        return f'const char *{symbol}(void) {{ return "no device: this is a stub"; }}'
    return f"int {symbol}(void) {{ return 100; }}"


def _readelf(what: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", what, str(library)], capture_output=True, text=True, check=True).stdout
