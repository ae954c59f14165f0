"""Drawing of figures into files. matplotlib is imported on use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def drawn(path: Path, *, dpi: int = 130, **figure: Any) -> Iterator[Any]:
    """Yield a figure, made by `pyplot.figure(**figure)`, and write it to `path` when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = pyplot.figure(**({"layout": "constrained"} | figure))
    try:
        yield made
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=dpi, metadata={"Software": None})
    finally:
        pyplot.close(made)
