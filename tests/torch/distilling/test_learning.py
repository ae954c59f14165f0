"""A learning drafter improves, and changes no token."""

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from moving import at_once, bits, drain, in_rounds, request, reserved
from worst_drafter import noisy

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.base import Learnt
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.distilling import learning as distilling
from rlhfspec.engine.distilling.before import drafter_of
from rlhfspec.engine.distilling.eagle_student import EagleStudent, chance_of_law
from rlhfspec.engine.distilling.lessons import Lesson, LessonRecorder, LessonRing
from rlhfspec.engine.distilling.pays import LearningBudget
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.heads.eagle import new_head
from rlhfspec.tiny import MODEL_KINDS, perturbed, random_model

pytestmark = pytest.mark.turns(parts=2)

VOCAB, DRAFTED, WIDTH = 61, 40, 48
CHAIN = DraftPlan(drafter="model", depth=4)
TREE = DraftPlan(drafter="model", depth=3, width=2, branch=2)
PROMPTS = [[1, 2, 3, 4, 5], [7] * 20, [9, 8], [7] * 20]


@pytest.fixture(scope="module")
def model() -> Any:
    return small("llama", seed=3)


@pytest.fixture(autouse=True)
def little_is_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the thresholds, so that a few short responses make several optimizer steps."""
    monkeypatch.setattr(distilling, "LESSON_TOKENS", 64)
    monkeypatch.setattr(distilling, "RING_TOKENS", 600)
    monkeypatch.setattr(distilling, "_SWAP_EVERY", 1)


def small(kind: str, seed: int) -> Any:
    return random_model(kind, seed=seed, vocab_size=VOCAB, num_layers=8)


def make(model: Any, draft: Any = "head", **options: Any) -> Engine:
    chosen = {"max_sequences": 4, "max_context": 96, "profile": False, "num_threads": 1, "speculation": CHAIN}
    draft = new_head(model, DRAFTED) if draft == "head" else copy.deepcopy(draft)
    return make_engine(copy.deepcopy(model), EngineConfig(**chosen | {"learning": 1.0} | options), draft=draft)


def generate(engine: Engine, seed: int = 0, *, temperature: float = 1.0, num_tokens: int = 40) -> list[Any]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=temperature)
    done = engine.generate(PROMPTS, params, seeds=range(seed, seed + len(PROMPTS)))
    return [(each.token_ids, each.log_probs, each.tempered_log_probs) for each in done]


def weights_of(engine: Engine) -> list[float]:
    return list(engine.state.eagle._head.norm.weight.tolist())


@pytest.mark.sweep(parts=6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_tokens_are_the_same_bits_while_the_drafter_learns(
    monkeypatch: pytest.MonkeyPatch, model: Any, temperature: float, dtype: str
) -> None:
    monkeypatch.setattr(distilling, "next_look", lambda num_steps: num_steps + 10**6)  # better or not, it is used
    plain = make(model, None, speculation="off", learning="off", dtype=dtype)
    learning = make(model, dtype=dtype)
    for number, plan in enumerate((CHAIN, TREE, "adaptive", "suffix")):
        learning.set_speculation(plan)
        before = weights_of(learning)
        assert generate(learning, number, temperature=temperature) == generate(plain, number, temperature=temperature)
        while learning.learning.learn_while_idle():
            learning.check_integrity()
        assert weights_of(learning) != before
        if number == 1:
            new = dict(perturbed(model, 0.2).state_dict())
            learning.load_weights(new, version=1)
            plain.load_weights(new, version=1)


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("way", [at_once, reserved, in_rounds])
def test_sequences_move_and_are_preempted_while_both_drafters_are_noise(model: Any, way: Callable[..., Any]) -> None:
    """The drafter gets random weights before every step, also during moves."""
    requests = [request(str(seed), tuple(PROMPTS[seed]), seed=seed) for seed in range(3)]
    plain = make(model, None, speculation="off", learning="off")
    for each in requests:
        plain.submit(each)
    expected = {name: bits(done) for name, done in drain(plain).items()}
    rng, done, num_moves = np.random.default_rng(3), {}, 0
    engines = [noisy(make(model, speculation=plan), rng) for plan in (TREE, "adaptive")]
    for number, each in enumerate(requests):
        engines[number % 2].submit(each)
    while any(engine.has_work for engine in engines):
        for engine in engines:
            done.update({each.id: each for each in (engine.step().finished if engine.has_work else ())})
        places = [(name, index) for index in (0, 1) for name in engines[index].state.sequences]
        for name, index in places[:1]:
            done.update({each.id: each for each in way(engines[index], engines[1 - index], name, rng) or ()})
            num_moves += 1
            if num_moves % 3 == 0:
                engines[1 - index].preempt(name)
    assert {name: bits(each) for name, each in done.items()} == expected
    assert num_moves > 3


def test_learning_improves_the_acceptance_of_drafts(model: Any) -> None:
    engine = make(model)
    before = tokens_a_verification(engine)
    for seed in range(100, 2000, 100):
        generate(engine, seed, num_tokens=70, temperature=0.5)
        while engine.learning.learn_while_idle():
            pass
    assert tokens_a_verification(engine) > before * 1.1
    report = engine.learning.report
    assert report.num_tokens > 2000
    assert report.seconds > 0
    assert report.law_now[0] > report.law_before[0]


def tokens_a_verification(engine: Engine) -> float:
    learning, engine.learning = engine.learning, None
    params = SamplingParams(max_tokens=70, ignore_eos=True, temperature=0.5)
    done = engine.generate(PROMPTS * 4, params, seeds=range(16))
    engine.learning = learning
    return sum(len(each.token_ids) for each in done) / sum(each.stats.num_verifications for each in done)


def recording_only(model: Any) -> Engine:
    engine = make(model)
    engine.learning.budget.may_learn = lambda *, idle: False  # type: ignore[method-assign]
    return engine


def test_labels_are_the_log_probs_of_the_target(model: Any) -> None:
    """Hugging Face's log-probs of the whole sequence are the slow twin."""
    engine, temperature = recording_only(model), 0.7
    done = generate(engine, temperature=temperature)
    prompt_of = {tokens: prompt for (tokens, _, _), prompt in zip(done, PROMPTS, strict=True)}
    assert engine.learning._recorder.rows == {}, "all have left their lessons"
    lessons = engine.learning._ring.take(most_tokens=10_000)
    assert sum(lesson.num_labels for lesson in lessons) == sum(len(tokens) for tokens, _, _ in done)
    for lesson in lessons:
        tokens = lesson.tokens.tolist()
        with torch.inference_mode():
            found = model(input_ids=torch.tensor([prompt_of[(*tokens,)] + tokens]), output_hidden_states=True)
        of_labels = slice(-lesson.num_labels - 1, -1)
        states = torch.cat([found.hidden_states[layer][0, of_labels] for layer in (2, 4, 5)], -1)
        torch.testing.assert_close(lesson.states.float(), states, atol=0.05, rtol=0.02)  # bfloat16
        expected = (found.logits[0] / temperature).log_softmax(-1)[of_labels]
        of_target = expected.gather(-1, torch.from_numpy(lesson.label_ids.astype(np.int64))).numpy()
        np.testing.assert_allclose(of_target, lesson.label_log_probs, atol=2e-2)  # float16
        assert (lesson.label_ids[:, 0] == expected.argmax(-1).numpy()).mean() > 0.99


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_drafter_for_every_family_learns(kind: str) -> None:
    engine = make(model := small(kind, seed=5))
    assert generate(engine, 3) == generate(make(model, None, speculation="off", learning="off"), 3)
    engine.learning.learn_while_idle()  # a quick engine had no time to learn between its steps
    assert engine.learning.report.num_tokens > 0


def test_the_first_drafter_drafts_until_the_learnt_one_is_better(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distilling, "LESSON_TOKENS", 32)  # less than a response
    engine, law = make(model), {True: (0.5,), False: (0.4,)}
    first, student = weights_of(engine), engine.state.student
    monkeypatch.setattr(student, "law", lambda lessons, at_first=False: law[at_first])
    for better in (False, True):
        law[False] = (0.6 if better else 0.4,)
        for seed in range(4):
            generate(engine, 10 * seed)
            while engine.learning.learn_while_idle():
                pass
        assert (weights_of(engine) != first) is better
        saved, drafting = dict(drafter_of(engine).named_parameters()), engine.learning.learnt().tensors
        assert all(torch.equal(saved[name], tensor) for name, tensor in drafting.items())


def a_student(model: Any) -> EagleStudent:
    return EagleStudent(new_head(model, DRAFTED), copy.deepcopy(model))


def test_the_drafting_weights_are_an_average_of_the_last_steps(model: Any) -> None:
    student = a_student(model)
    expected = {name: tensor.clone() for name, tensor in student.model.named_parameters()}
    for step in range(1, 5):
        student.learn([a_lesson(8)])
        kept = step / (step + 9)
        for name, tensor in student.model.named_parameters():
            expected[name] = kept * expected[name] + (1 - kept) * tensor
    found = student.state_dict()
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in expected.items())
    assert not torch.equal(found["fc.weight"], student.model.fc.weight)
    assert torch.equal(found["lm_head.weight"], student.model.lm_head.weight), "the output stays"


def test_a_lesson_with_nan_resets_the_student_to_its_first_weights(model: Any) -> None:
    student = a_student(model)
    first = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    student.learn([a_lesson(8)])
    assert any(not torch.equal(tensor, first[name]) for name, tensor in student.state_dict().items())
    broken = a_lesson(8)
    broken.label_log_probs[3] = np.nan
    student.learn([broken])
    assert all(torch.equal(tensor, first[name]) for name, tensor in student.state_dict().items())


def test_the_law_is_the_share_of_equal_choices_under_one_noise() -> None:
    torch.manual_seed(1)
    drafter, target = (torch.randn(3, 7).log_softmax(-1) for _ in range(2))
    noise = -torch.rand(20_000, 1, 7).log().neg().log()
    same = (drafter + noise).argmax(-1) == (target + noise).argmax(-1)
    torch.testing.assert_close(chance_of_law(drafter, target), same.float().mean(0), atol=0.02, rtol=0)
    cut = [each.where(torch.arange(7) < 5, -1e4) for each in (drafter, target)]
    assert (chance_of_law(*cut) <= chance_of_law(drafter, target)).all(), "what is left out is never counted"


def test_memory_is_bounded() -> None:
    recorder = LessonRecorder(ring := LessonRing(most_tokens=100, passes=4))
    for row in range(40):
        recorder.start(row, 1.0)
    assert len(recorder.rows) == 16
    tokens = np.arange(4000, dtype=np.int32)
    for row in list(recorder.rows):
        for position in range(10, 3000):
            recorder.note(row, position, *labels(1), tokens[:position], torch.zeros(1, 3 * WIDTH))
    assert ring.num_tokens == 0, "a lesson that is larger than the ring is not kept"
    for number in range(60):
        ring.add(a_lesson(7))
        assert ring.num_tokens <= 100
        if number % 5 == 0:
            ring.take(most_tokens=20)
    for row in list(recorder.rows):
        recorder.forget(row, tokens)
    recorder.start(1, 1.0)
    assert sum(lesson.num_labels for lesson in ring.take(most_tokens=10_000)) == ring.num_tokens


def test_the_ring_gives_new_lessons_first_and_each_a_few_times() -> None:
    ring = LessonRing(most_tokens=22, passes=3)
    first, second = a_lesson(5), a_lesson(6)
    ring.add(first)
    assert ring.take(most_tokens=5) == [first]
    ring.add(second)
    assert ring.take(most_tokens=5) == [second], "one, though it is larger"
    assert ring.take(most_tokens=20) == [first, second]
    assert ring.take(most_tokens=20) == [first, second]
    assert ring.take(most_tokens=20) == []
    assert ring.num_tokens == 0
    ring.add(first)
    assert ring.take(most_tokens=20) == [first]
    assert ring.take(most_tokens=20) == [], "so few are learnt by heart"


def test_learning_spends_no_more_than_its_share_of_time() -> None:
    budget = LearningBudget(share=0.1)
    busy = idle = 0.0
    for _ in range(500):
        budget.stepped(0.01)
        if budget.may_learn(idle=False):
            budget.spent(seconds=0.05, num_tokens=10)
            busy += 0.05
        if budget.may_learn(idle=True):
            budget.spent(seconds=0.05, num_tokens=10, idle=True)
            idle += 0.05
    assert busy == pytest.approx(0.5, abs=0.06)
    assert idle == pytest.approx(25.0)


def test_a_short_step_is_only_noted_when_learning_does_not_pay(model: Any) -> None:
    """The test counts the calls that learning makes in a step of a millisecond."""
    engine, counted, num_steps = make(model, learning="auto"), Counter[str](), 0
    learning = engine.learning
    learning.budget.spent(seconds=1e6, num_tokens=512)
    genuine = learning.stepped

    def stepped(seconds: float, *given: Any, has_finished: bool) -> None:
        nonlocal num_steps
        num_steps += 1
        genuine(0.001, *given, has_finished=has_finished)

    def count(frame: Any, event: str, _: Any) -> None:
        callers = (frame, frame.f_back) if event == "call" else (frame,)
        files = [each.f_code.co_filename for each in callers if each]
        if event in ("call", "c_call") and any("engine/distilling/" in file for file in files):
            counted[event] += 1

    learning.stepped = stepped  # type: ignore[method-assign]
    sys.setprofile(count)
    try:
        for seed in range(4):
            generate(engine, seed, num_tokens=70)
    finally:
        sys.setprofile(None)
    assert num_steps > 100
    assert counted.total() < 6 * num_steps, counted


def test_the_time_of_storing_lessons_counts_against_the_budget(model: Any) -> None:
    engine = recording_only(model)
    put_away: list[int] = []
    genuine = engine.learning.budget.recorded

    def recorded(*, seconds: float, num_tokens: int = 0) -> None:
        put_away.append(num_tokens)
        genuine(seconds=seconds, num_tokens=num_tokens)

    engine.learning.budget.recorded = recorded  # type: ignore[method-assign]
    generate(engine)
    assert put_away.count(0) == len(PROMPTS)


def test_the_time_of_labels_counts_against_the_budget() -> None:
    budget = LearningBudget(share=None)
    assert not budget.may_record(1), "no time has passed"
    budget.stepped(10.0)
    assert budget.may_record(256)
    budget.recorded(seconds=0.09, num_tokens=100)
    assert budget.may_record(10)
    assert not budget.may_record(256), "a hundredth of the time is spent"
    assert budget.report.seconds == 0.09
    assert LearningBudget(share=0.05).may_record(10_000)


@pytest.mark.parametrize(("pays", "share"), [(True, 0.04), (False, 0.012)])
def test_learning_continues_while_it_pays(pays: bool, share: float) -> None:
    """If drafts are unused or no better, one part in a hundred is spent on trials."""
    budget, spent = LearningBudget(share=None), 0.0
    budget.agreed((0.5,), (0.8 if pays else 0.5,))
    for _ in range(5000):
        budget.stepped(0.01, num_verifications=4, num_tokens=12)
        for idle in (True, False):
            if budget.may_learn(idle=idle):
                budget.spent(seconds=0.05, num_tokens=10, idle=idle)
                spent += 0.05
    assert spent > 50 * share if pays else spent < 50 * share


def test_learning_counts_only_sequences_that_were_drafted_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counted = make(model, speculation=DraftPlan(drafter="model", depth=4, num_sequences=1)), set[int]()
    monkeypatch.setattr(engine.learning.budget, "stepped", lambda seconds, num, num_tokens: counted.add(num))
    generate(engine)
    assert counted == {0, 1}, "a prompt's token is not drafted"


def test_an_engine_that_learns_says_so(model: Any) -> None:
    assert make(model).abilities.learning is not None
    plain = make(model, None, speculation="off")
    for engine in (plain, make(model, learning="off"), make(model, "self"), make(model, "auto")):
        assert engine.abilities.learning is None
    with pytest.raises(InvalidRequest, match="learning"):
        EngineConfig(learning=1.5)


def test_a_draft_model_drafts_but_does_not_learn(model: Any) -> None:
    plain = make(model, None, speculation="off", learning="off")
    assert generate(make(model, perturbed(model, 0.15), learning="off")) == generate(plain)
    with pytest.raises(InvalidRequest, match="only EAGLE-3 drafters learn: make one with rlhfspec drafter train"):
        make(model, perturbed(model, 0.15))


def labels(count: int) -> tuple[Any, Any]:
    return np.tile(np.arange(8, dtype=np.int32), (count, 1)), np.full((count, 8), np.log(1 / 8), np.float16)


def a_lesson(num_labels: int) -> Lesson:
    ids, log_probs = labels(num_labels)
    tokens, states = np.arange(num_labels, dtype=np.int32) % VOCAB, torch.ones(num_labels, 3 * WIDTH)
    return Lesson(tokens=tokens, label_ids=ids, label_log_probs=log_probs, temperature=1.0, states=states)


def test_another_engine_can_continue_from_learnt_weights(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(distilling, "next_look", lambda num_steps: num_steps + 10**6)  # better or not, it is used
    one, other = make(model), make(model)
    plain = generate(make(model, None, speculation="off", learning="off"), 5)
    generate(one)
    while one.learning.learn_while_idle():
        pass
    learnt = one.learning.learnt()
    assert learnt.version > 0
    assert weights_of(other) != weights_of(one)
    assert other.learning.take(learnt)
    assert weights_of(other) == weights_of(one)
    assert not other.learning.take(learnt), "it has it already"
    assert generate(other, 5) == plain
    report = other.learning.report
    assert report.version == learnt.version + report.num_tokens


def test_what_another_drafter_learnt_is_refused_and_changes_nothing(model: Any) -> None:
    engine = make(model)
    learnt = engine.learning.learnt()
    before, (first, *_) = weights_of(engine), learnt.tensors
    wrong = [{"weight": torch.ones(3)}, {**learnt.tensors, first: learnt.tensors[first][:-1]}]
    wrong += [{**learnt.tensors, first: learnt.tensors[first].double()}]
    wrong += [{**learnt.tensors, first: learnt.tensors[first] * float("nan")}]
    for tensors in wrong:
        with pytest.raises(InvalidRequest, match="drafter"):
            engine.learning.take(Learnt(version=10, tensors=tensors))
    assert weights_of(engine) == before
