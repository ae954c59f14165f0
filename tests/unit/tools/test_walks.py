"""The counting of files along a walk: chains of calls in a small tree, and that this tree's walks still exist."""

from pathlib import Path

import pytest
from walks import ROOT, WALKS, CallGraph

FILES = {
    "base.py": "class Store(Protocol):\n    def put(self): ...\n",
    "file.py": "class FileStore:\n    def put(self): ...\n",
    "part.py": "from rlhfspec.base import Store\nclass Part:\n    def __init__(self, store: Store):\n"
    "        self._store = store\n    def keep(self):\n        self._store.put()\n",
    "main.py": "from rlhfspec.part import Part\ndef run():\n    part = Part(None)\n    part.keep()\ndef idle(): ...\n",
}


def test_a_chain_follows_imports_types_and_protocols(tmp_path: Path) -> None:
    folder = tmp_path / "libs" / "rlhfspec"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    graph = CallGraph(tmp_path)
    chain = graph.chain(graph.find("main.run"), graph.find("FileStore.put"))
    assert [graph.files[name].name for name in chain] == ["main.py", "part.py", "file.py"]
    with pytest.raises(SystemExit, match="no chain"):
        graph.chain(graph.find("main.idle"), graph.find("FileStore.put"))


def test_every_walk_can_be_walked() -> None:
    graph = CallGraph(ROOT)
    for legs in WALKS.values():
        for first, last in legs:
            assert graph.chain(graph.find(first), graph.find(last))
