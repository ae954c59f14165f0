"""Rewards: arguments of functions and models, valid numbers, and no failure as zero."""

import logging
import sys
import threading
import traceback
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from reward_desks import HANG, Desk, run, sample

from rlhfspec.errors import InvalidRequest, RewardError
from rlhfspec.messages.records import Score
from rlhfspec.training.scoring.rewards.attempts import delay_seconds
from rlhfspec.training.scoring.rewards.base import CallFailed, combine, number, numbers_of
from rlhfspec.training.scoring.rewards.user_code import in_daemon_thread


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_function_gets_what_its_signature_asks_for(desk: Desk) -> None:
    code = "def reward(completion, answer, prompt): return float(prompt + completion == '2+2=' + answer)"
    (score,) = desk.score(code)
    place = {"id": "sums/1/0/0/reward", "sample_id": "sums/1/0/0", "job": "sums", "step": 1, "stage": "reward"}
    assert score == Score(values=(1.0,), components=(("reward", 1.0),), **place)


@pytest.mark.parametrize(
    "code",
    [
        "def reward(**given): return sorted(given) == ['answer', 'completion', 'finish_reason', 'prompt']",
        "def reward(completion, hint='none'): return hint == 'none'",
    ],
    ids=["two stars", "a default"],
)
def test_a_signature_may_ask_for_everything_and_for_a_column_that_is_not_there(desk: Desk, code: str) -> None:
    assert desk.score(code)[0].values == (1.0,)


def test_an_async_function_is_awaited_and_keeps_its_event_loop(desk: Desk) -> None:
    code = """
import asyncio
loops = set()
async def reward(completion):
    await asyncio.sleep(0)
    loops.add(asyncio.get_running_loop())
    return len(loops)
"""
    assert [score.values for score in desk.score(code, [sample(prompt) for prompt in range(3)])] == [(1.0,)] * 3


def test_a_batched_function_gets_a_prompt_group_in_id_order_whatever_the_order_of_arrival(desk: Desk) -> None:
    """A reward may compare the group's members, so the order of arrival must not change the curve."""
    code = """
def reward(prompts, completions, answer):
    assert prompts == ['2+2='] * 12 and len(answer) == 12
    return [float(place) + len(text) / 100 for place, text in enumerate(completions)]
"""
    group = [sample(replica=replica, text="x" * replica) for replica in range(12)]
    forwards = desk.score(code, group, batched=True)
    assert forwards == desk.score(code, group[::-1], batched=True)
    assert [score.values[0] for score in forwards] == [replica + replica / 100 for replica in range(12)]
    assert desk.sources({"function": "rewards:reward", "batched": True}).grouping == "group"


def test_groups_are_never_mixed(desk: Desk) -> None:
    desk.write("def reward(completions): return [0.0 for _ in completions]")
    with pytest.raises(AssertionError, match="one group at a time"):
        run(desk.sources({"function": "rewards:reward", "batched": True}), [sample(0), sample(1)])


def test_a_function_cannot_change_what_another_one_sees(desk: Desk) -> None:
    desk.write("def taint(answer):\n    answer.append(1)\n    return 0\ndef clean(answer): return len(answer)")
    sources = desk.sources({"function": "rewards:taint"}, {"function": "rewards:clean"})
    assert run(sources, sample(columns={"answer": []}))[0].values == (0.0,)


@pytest.mark.parametrize(
    "value", [1, 1.0, True, Fraction(2, 2), np.float32(1), np.bool_(True), np.array(1.0), torch.tensor(1.0)], ids=repr
)
def test_numbers_of_any_type_are_accepted_as_rewards(value: object) -> None:
    assert number(value, "it") == 1.0
    assert type(number(value, "it")) is float


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "it is nan, not a finite number"),
        (float("-inf"), "it is -inf, not a finite number"),
        (10**400, "it is inf, not a finite number"),
        (np.float64("nan"), "it is nan, not a finite number"),
        (torch.tensor(float("inf")), "it is inf, not a finite number"),
        (None, "it is None, not a number"),
        ("0.5", "it is '0.5' (str), not a number"),
        ([0.5], "it is a list of length 1, not a number"),
        (torch.tensor([1.0]), "it is tensor([1.]) (Tensor), not a number"),
        (1 + 0j, "it is (1+0j) (complex), not a number"),
    ],
    ids=repr,
)
def test_a_reward_that_is_no_number_is_refused(value: object, problem: str) -> None:
    with pytest.raises(CallFailed) as failure:
        number(value, "it")
    assert failure.value.problem == problem
    assert not failure.value.temporary


@pytest.mark.parametrize("values", [[1.0, 2.0], (1, 2.0), np.array([1, 2]), torch.tensor([1.0, 2.0])], ids=repr)
def test_lists_of_numbers_of_any_type_are_accepted_as_rewards(values: object) -> None:
    assert numbers_of(values, [sample(replica=0), sample(replica=1)]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("[1.0]", "it returned 1 rewards for 2 samples"),
        ("1.0", "it returned 1.0 (float), not a list of 2 numbers"),
        ("None", "it returned None, not a list of 2 numbers"),
        ("(x for x in (1, 2))", "not a list of 2 numbers"),
        ("[1.0, float('nan')]", "what it returned is nan, not a finite number"),
        ("[1.0, None]", "what it returned is None, not a number"),
        ("[[1.0], [2.0]]", "what it returned is a list of length 1, not a number"),
    ],
)
def test_a_wrong_batch_ends_the_job(desk: Desk, returned: str, problem: str) -> None:
    group = [sample(replica=0), sample(replica=1)]
    with pytest.raises(RewardError, match=r"reward 'reward' of sample sums/1/0/\d: ") as failure:
        desk.score(f"def reward(completions): return {returned}", group, batched=True)
    assert problem in failure.value.problem


def test_one_bad_number_of_a_batch_is_one_bad_sample(desk: Desk) -> None:
    code = "def reward(completions): return [1.0, float('nan')]"
    good, bad = desk.score(code, [sample(replica=0), sample(replica=1)], batched=True, onError="drop")
    assert (good.values, good.error) == ((1.0,), "")
    assert (bad.values, bad.error) == ((), "reward 'reward': what it returned is nan, not a finite number")


def test_a_raising_function_ends_the_job_and_says_where_and_why(desk: Desk) -> None:
    with pytest.raises(RewardError) as failure:
        desk.score("def reward(answer): return {}[answer]", sample(3, 1), retries=2)
    assert str(failure.value) == "reward 'reward' of sample sums/1/3/1: it raised KeyError: '4' (3 calls)"
    assert isinstance(failure.value.__cause__, KeyError)
    assert "return {}[answer]" in "".join(traceback.format_exception(failure.value.__cause__))


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt()", "StopIteration()", "GeneratorExit()"])
@pytest.mark.parametrize("define", ["def", "async def"])
def test_no_exception_of_a_function_unwinds_more_than_its_call(desk: Desk, define: str, error: str) -> None:
    with pytest.raises(RewardError, match="it raised"):
        desk.score(f"{define} reward(completion): raise {error}")


def test_a_dropped_sample_says_why_and_has_no_value(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.write("def bad(completion): raise ValueError('no')\ndef good(completion): return 0.5")
    sources = desk.sources({"function": "rewards:bad", "onError": "drop"}, {"function": "rewards:good"})
    with caplog.at_level(logging.WARNING):
        (score,) = run(sources)
    assert (score.values, score.components) == ((), (("good", 0.5),))
    assert score.error == "reward 'bad': it raised ValueError: no"
    assert "sums/1/0/0 is left out" in caplog.text
    assert caplog.text.count("is left out") == 1, "a step whose source is down tells it once"


def test_an_error_of_policy_fail_wins_over_one_of_policy_drop(desk: Desk) -> None:
    desk.write("def bad(completion): raise ValueError('no')\ndef worse(completion): return None")
    with pytest.raises(RewardError, match="'worse'"):
        run(desk.sources({"function": "rewards:bad", "onError": "drop"}, {"function": "rewards:worse"}))


def test_what_was_not_generated_is_not_scored(desk: Desk) -> None:
    code = "def reward(completions): return [float(len(completions))] * len(completions)"
    missing, scored = desk.score(code, [sample(replica=0, error="infinite logits"), sample(replica=1)], batched=True)
    assert (missing.values, missing.error) == ((), "not generated: infinite logits")
    assert scored.values == (1.0,)


def test_a_failed_call_is_tried_again_with_growing_delays(desk: Desk) -> None:
    code = """
calls = []
def reward(completion):
    calls.append(1)
    if len(calls) < 4: raise OSError('busy')
    return len(calls)
"""
    assert desk.score(code, retries=3)[0].values == (4.0,)
    assert desk.naps.seconds == [delay_seconds("reward", "sums/1/0/0", attempt) for attempt in (1, 2, 3)]
    assert 0.5 <= desk.naps.seconds[0] < 1.0 <= desk.naps.seconds[1] < 2.0 <= desk.naps.seconds[2] < 4.0


def test_a_failing_source_is_reported_while_it_is_retried(desk: Desk) -> None:
    code = """
calls = []
def reward(completion):
    calls.append(1)
    if len(calls) < 3: raise OSError('busy')
    return 1.0 if len(calls) == 4 else None
"""
    desk.write(code)
    desk.write("def good(completion): return 0.0", "fine")
    sources = desk.sources({"function": "rewards:reward", "retries": 9}, {"function": "fine:good"})
    told: list[str] = []
    with pytest.raises(RewardError):  # the third call returns nothing
        run(sources, in_trouble=told.append)
    run(sources, in_trouble=told.append)
    failed, returned = "it raised OSError: busy", "what it returned is None, not a number"
    assert told == [f"reward 'reward': {failed}", f"reward 'reward': {returned}", ""]


def test_a_wrong_answer_of_a_source_is_not_retried(desk: Desk) -> None:
    with pytest.raises(RewardError, match=r"None, not a number$"):
        desk.score("def reward(completion): return None", retries=5)
    assert desk.naps.seconds == []


BLOCK = "import threading\nasync def reward(completion): threading.Event().wait()"
AWAIT = "import asyncio\nasync def reward(completion): await asyncio.Event().wait()"


@pytest.mark.parametrize("code", [HANG, BLOCK, AWAIT], ids=["function", "blocked loop", "async function"])
def test_a_hanging_function_ends_with_its_name(desk: Desk, code: str) -> None:
    with pytest.raises(RewardError, match=r"it gave no answer within 0.05 s \(2 calls\)"):
        desk.score(code, timeoutSeconds=0.05, retries=1)


def test_a_blocked_event_loop_does_not_take_the_next_call_with_it(desk: Desk) -> None:
    code = """
import threading
calls = []
async def reward(completion):
    calls.append(1)
    if len(calls) == 1: threading.Event().wait()
    return 7
"""
    assert desk.score(code, timeoutSeconds=0.5, retries=1)[0].values == (7.0,)


def test_concurrent_calls_of_a_source_are_limited(desk: Desk) -> None:
    code = """
import threading
lock, running, most = threading.Lock(), 0, 0
both = threading.Barrier(2, timeout=60)
def reward(completion):
    global running, most
    with lock:
        running += 1
        most = max(most, running)
    both.wait()
    with lock: running -= 1
    return most
"""
    scores = desk.score(code, [sample(prompt) for prompt in range(8)], concurrency=2)
    assert max(score.values for score in scores) == (2.0,)


def test_sources_run_concurrently(desk: Desk) -> None:
    desk.write(
        "import threading\nboth = threading.Barrier(2, timeout=60)\ndef reward(completion): return both.wait() * 0"
    )
    source = {"function": "rewards:reward"}
    assert run(desk.sources(source, source))[0].components == (("reward", 0.0), ("reward-2", 0.0))


@pytest.mark.parametrize(("how", "total"), [("sum", 2.5), ("min", -0.5), ("product", -1.5)])
def test_components_are_unweighted_and_the_value_is_not(desk: Desk, how: str, total: float) -> None:
    desk.write("def good(completion): return 3.0\ndef bad(completion): return -1.0")
    sources = desk.sources(
        {"function": "rewards:good"}, {"function": "rewards:bad", "weight": 0.5, "name": "penalty"}, combine=how
    )
    (score,) = run(sources)
    assert score.components == (("good", 3.0), ("penalty", -1.0))
    assert score.values == (total,)


def test_a_combination_that_overflows_is_an_error(desk: Desk) -> None:
    desk.write("def reward(completion): return 1e200")
    source = {"function": "rewards:reward"}
    with pytest.raises(RewardError, match="their product is inf"):
        run(desk.sources(source, source, combine="product"))


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=4))
@settings(max_examples=30)
def test_combinations_equal_their_definitions(pairs: list[tuple[float, float]]) -> None:
    weights, values = [w for w, _ in pairs], [v for _, v in pairs]
    terms = np.array(weights) * np.array(values)
    assert combine("sum", weights, values) == pytest.approx(terms.sum(), abs=1e-6)
    assert combine("min", weights, values) == terms.min()
    assert combine("product", weights, values) == pytest.approx(terms.prod())


def test_sources_get_unique_names_without_secrets(desk: Desk) -> None:
    desk.write("def reward(completion): return 0.0")
    http = {"type": "http", "url": "https://me:secret@judge.example:8443/v1/score?key=secret"}
    sources = desk.sources({"function": "rewards:reward"}, {"function": "rewards:reward"}, http)
    assert sources.names == ["reward", "reward-2", "judge.example/v1/score"]


def test_scores_do_not_depend_on_arrival(desk: Desk) -> None:
    code = "def reward(completion): return len(completion)"
    samples = [sample(prompt, replica, text="x" * prompt) for prompt in range(5) for replica in range(2)]
    together = desk.score(code, samples)
    alone = [score for one in samples[::-1] for score in desk.score(code, one)]
    assert together == alone[::-1] == desk.score(code, samples[::-1])


def test_the_file_beside_the_job_wins_and_two_jobs_do_not_share_one_name(desk: Desk, tmp_path: Path) -> None:
    desk.write("def reward(completion): return 1.0", module="colorsys")
    other = Desk(tmp_path / "other")
    other.folder.mkdir()
    other.write("def reward(completion): return 2.0", module="colorsys")
    assert [run(d.sources({"function": "colorsys:reward"}))[0].values for d in (desk, other)] == [(1.0,), (2.0,)]
    import colorsys

    assert hasattr(colorsys, "rgb_to_hsv")


def test_modules_beside_the_job_may_import_each_other_and_nobody_else_may(desk: Desk) -> None:
    desk.write("ONE = 1.0", module="beside_the_job")
    before = list(sys.path)
    assert desk.score("from beside_the_job import ONE\ndef reward(completion): return ONE")[0].values == (1.0,)
    assert sys.path == before


def test_packages_beside_the_job_may_be_named_with_dots(desk: Desk) -> None:
    (desk.folder / "judges_of_sums").mkdir()
    desk.write("ONE = 1.0", module="judges_of_sums/numbers")
    desk.write("from .numbers import ONE\ndef reward(completion): return ONE", module="judges_of_sums/exact")
    assert run(desk.sources({"function": "judges_of_sums.exact:reward"}))[0].values == (1.0,)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("rewards", "must be module:function"),
        ("rewards:", "must be module:function"),
        ("rewards.py:reward", "no module 'rewards.py' beside the job file"),
        ("./rewards:reward", "must be module:function"),
        ("reward:reward", "no module 'reward' beside the job file (in {folder}) or installed; did you mean rewards?"),
        ("rewards:rewrd", "module 'rewards' has no 'rewrd'; did you mean reward?"),
        ("rewards:ANSWER", "'ANSWER' is a int, not a function"),
        ("broken:reward", "importing 'broken' raised SyntaxError"),
        ("raising:reward", "importing 'raising' raised SystemExit: 3"),
        ("lacking:reward", "importing 'lacking' raised ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("rewards:by_place", "arguments are passed by name, but this one is positional-only"),
        ("builtins:dict", "its signature cannot be read; wrap it in a def"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_anything_runs(desk: Desk, function: str, problem: str) -> None:
    desk.write("ANSWER = 42\ndef reward(completion): return 0\ndef by_place(completion, /): return 0")
    desk.write("def reward(:", module="broken")
    desk.write("raise SystemExit(3)", module="raising")
    desk.write("import nowhere_to_be_found", module="lacking")
    with pytest.raises(InvalidRequest) as error:
        desk.sources({"function": "rewards:reward"}, {"function": function})
    assert error.value.field == "spec.rewards.sources[1].function"
    assert problem.format(folder=desk.folder) in error.value.problem


def test_columns_are_checked_once_the_data_is_known(desk: Desk) -> None:
    desk.write("def reward(completion, anser, hint=None): return 0")
    sources = desk.sources({"function": "rewards:reward"})
    sources.check_columns({"anser": ""})
    with pytest.raises(InvalidRequest, match=r"did you mean answer\? Known: prompt, completion, finish_reason, answer"):
        sources.check_columns({"answer": ""})
    with pytest.raises(InvalidRequest, match="needs this column, and line 7 of the data lacks it"):
        sources.check_columns({"anser": "line 7", "hint": "line 2"})


def test_a_row_without_the_column_is_an_error_and_not_none(desk: Desk) -> None:
    with pytest.raises(RewardError, match="its data row has no column 'answer', which the function needs"):
        desk.score("def reward(answer): return 0", sample(columns={}))


def test_calls_one_after_the_other_share_a_thread_and_one_that_hangs_is_never_used_again() -> None:
    first, *others = [in_daemon_thread(threading.get_ident).result(timeout=60.0).value for _ in range(20)]
    assert set(others) == {first}
    release = threading.Event()
    hanging = in_daemon_thread(lambda: (threading.get_ident(), release.wait(30.0)))
    after = [in_daemon_thread(threading.get_ident).result(timeout=60.0).value for _ in range(3)]
    release.set()
    assert hanging.result(timeout=60.0).value[0] not in after
