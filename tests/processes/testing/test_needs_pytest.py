import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_what_is_missing_is_named_with_how_to_get_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import rlhfspec.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"rlhfspec.testing needs {missing}: pip install 'rlhfspec[testing]'" in done.stderr
