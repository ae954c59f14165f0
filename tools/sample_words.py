"""Draw docstrings and sentences at random, for readers who judge whether they understand them at the first reading.

    python tools/sample_words.py --seed 3 > sample.md     # 200 docstrings without bodies, 60 sentences of documents

A reader marks each as clear, odd or unclear. A good state has fewer than 5 unclear docstrings and 3 unclear sentences.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

from house import Documented, House


def docstrings(house: House) -> Iterator[str]:
    """Yield each docstring below its place and the first line of what it describes."""
    for path, node, text in house.docstrings():
        yield f"{path}:{getattr(node, 'lineno', 1)} {_head(node)}\n{text}"


def _head(node: Documented) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"def {node.name}({ast.unparse(node.args)})"
    return f"class {node.name}" if isinstance(node, ast.ClassDef) else ""


def sentences(house: House) -> Iterator[str]:
    """Yield each sentence of the documents, outside of tables and blocks of code."""
    for path in house.documents:
        prose = re.sub(r"^```.*?^```|^[|#].*?$", "", house.text(path), flags=re.DOTALL | re.MULTILINE)
        for sentence in re.split(r"(?<=[.!?])\s+|\n\n+", prose):
            if len(sentence.split()) > 3:
                yield f"{path}: {' '.join(sentence.split())}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw docstrings and sentences at random.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    house, dice = House.of_git(Path(__file__).parent.parent), random.Random(given.seed)
    for title, texts, number in (("Docstrings", docstrings(house), 200), ("Sentences", sentences(house), 60)):
        print(f"# {title}\n")
        for place, text in enumerate(dice.sample(list(texts), number), 1):
            print(f"{place}. {text}\n")


if __name__ == "__main__":
    main()
