import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_a_missing_package_is_named_with_the_pip_command(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import rlhfspec.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"rlhfspec.testing needs {missing}: pip install 'rlhfspec[testing]'" in done.stderr
