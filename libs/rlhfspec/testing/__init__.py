"""Contract tests for implementations of rlhfspec's interfaces; they need pytest.

from rlhfspec.testing.transport import TransportContract

class TestMine(TransportContract):
    @asynccontextmanager
    async def open(self, *, max_pending, publish_timeout_seconds):
        yield TransportHarness(MyTransport(...))
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise ImportError(f"rlhfspec.testing needs {error.name}: pip install 'rlhfspec[testing]'") from error

SUITES = ("drafter", "engine", "link", "movable", "transport", "weight_store")
# Before the suites are imported, so that a failed assertion shows its values.
pytest.register_assert_rewrite(*(f"rlhfspec.testing.{name}" for name in (*SUITES, "transport_harness")))
