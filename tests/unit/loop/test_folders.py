from places import ROOT

from rlhfspec.messages.loop import STAGES

NO_STAGES = {"cli", "control", "dashboard", "prepare", "supervisor", "tiny"}


def test_stages_are_the_folders_of_services() -> None:
    folders = {path.name for path in (ROOT / "services" / "rlhfspec").iterdir() if (path / "__init__.py").exists()}
    assert folders - NO_STAGES == {stage.name for stage in STAGES}
