from pathlib import Path
from typing import Any

import pytest
from small_job import a_job

from rlhfspec.common.gpus import VISIBLE, see_only, visible
from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.supervisor.commands import arguments_of
from rlhfspec.supervisor.gpus import deal
from rlhfspec.supervisor.place import ProcessPlace
from rlhfspec.worker import process
from rlhfspec.worker.ranks import gpu_of

NODE = [str(index) for index in range(8)]


def job(*, device: str = "auto", share_gpus: bool = False, **blocks: Any) -> RLHFJob:
    made = a_job(**{"roles": {"generator": {"workers": 2}, "trainer": {"nodes": 2}}} | blocks)
    return made.model_copy(update={"spec": made.spec.model_copy(update={"device": device, "share_gpus": share_gpus})})


def test_every_process_that_runs_a_model_has_a_gpu_of_its_own() -> None:
    dealt = deal(job(algorithm={"name": "ppo", "klCoefficient": 0.1}), NODE)
    assert dealt[("trainer", 0)] == ["0", "1"]
    assert dealt[("generator", 0)] == ["2"]
    assert dealt[("generator", 1)] == ["3"]
    given = [gpu for gpus in dealt.values() for gpu in gpus]
    assert len(given) == len(set(given))
    assert {stage for stage, _ in dealt} == {"trainer", "generator", "reference", "critic"}


def test_a_generator_in_parts_has_a_gpu_for_each() -> None:
    dealt = deal(job(roles={"generator": {"workers": 2, "tensorParallel": 2}}), NODE)
    assert dealt == {("trainer", 0): ["0"], ("generator", 0): ["1", "2"], ("generator", 1): ["3", "4"]}
    said = r"5 processes need a GPU each \(trainer 1, generator 4\), but there are 4"
    with pytest.raises(InvalidRequest, match=said):
        deal(job(roles={"generator": {"workers": 2, "tensorParallel": 2}}), NODE[:4])


def test_too_few_gpus_are_refused_unless_the_job_shares_them() -> None:
    said = r"5 processes need a GPU each \(trainer 2, generator 2, reference 1\), but there"
    with pytest.raises(InvalidRequest, match=said):
        deal(job(algorithm={"klCoefficient": 0.1}), NODE[:3])
    dealt = deal(job(share_gpus=True, algorithm={"klCoefficient": 0.1}), NODE[:3])
    assert dealt[("trainer", 0)] == ["0", "1"]
    assert [dealt[("generator", 0)], dealt[("generator", 1)], dealt[("reference", 0)]] == [["2"], ["0"], ["1"]]


@pytest.mark.parametrize("spec", [{"device": "cpu"}, {"device": "cuda:1"}, {"training": {"exactOnPolicy": True}}])
def test_a_job_that_sets_its_devices_gets_no_gpus(spec: dict[str, Any]) -> None:
    assert deal(job(**spec), NODE[:1]) == {}


def test_a_rank_sees_one_gpu_of_its_process(tmp_path: Path) -> None:
    for rank, mine in (("0", "4"), ("1", "5")):
        environment = {"LOCAL_RANK": rank, VISIBLE: "0,1,2,3,4,5"}
        see_only("4,5", environment)
        assert environment[VISIBLE] == mine
    in_a_pod = {"LOCAL_RANK": "1", VISIBLE: "GPU-a,GPU-b"}
    see_only(None, in_a_pod)
    assert in_a_pod[VISIBLE] == "GPU-b"
    alone = {"HOME": "/tmp"}
    see_only(None, alone)
    assert alone == {"HOME": "/tmp"}
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible({}, tmp_path) == ["0", "1"]  # as CUDA counts those that a container has


def test_a_worker_reads_the_gpus_that_the_supervisor_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ProcessPlace(RunFolder(tmp_path))
    arguments = arguments_of(job(), place, deal(job(), NODE), "trainer", 0)
    assert arguments[arguments.index("--gpus") + 1] == "0,1", "of the set"
    for rank in (0, 1):
        own = [*arguments[arguments.index("rlhfspec.trainer") :], *gpu_of(rank, ["0", "1"])]
        monkeypatch.setattr("sys.argv", [str(word) for word in own])
        assert process._arguments("trainer").gpus == str(rank)
    assert "--gpus" not in arguments_of(job(), place, deal(job(), NODE), "prompts", 0)
