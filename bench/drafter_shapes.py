"""Which shape a drafter made of the policy should have: python bench/drafter_shapes.py [--tokens 49152] [--rounds 8].

Shapes are the policy's own layers that draft, and those behind them that learn. All learn from the same tokens of the
synthetic policy `tiny:library` (3.3M parameters, four layers), recorded once, each token `--passes` times. Then each
drafts, `adaptive`, for `tiny:library-wide`, the same function at 77M, in float32 on one thread; rounds take turns.
Tokens a verification, and tokens a second over those of `first + one`, which is what `drafter: auto` makes.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlhfspec.bench.generating.learnt import learn_from
from rlhfspec.bench.ratios import paired
from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.distilling.learning import LESSON_TOKENS
from rlhfspec.engine.distilling.lessons import Lesson, LessonRing
from rlhfspec.engine.distilling.student import Student
from rlhfspec.huggingface.loading import load_model
from rlhfspec.tiny import library
from rlhfspec.tiny.models import ensure

SHAPES = {  # the policy's layers, the last `learning` of which learn
    "first + one": ((0, 3), 1),
    "none + one": ((3,), 1),
    "first two + one": ((0, 1, 3), 1),
    "first + two": ((0, 2, 3), 2),
}


def recorded(policy: Path, num_tokens: int) -> list[Lesson]:
    """What the policy said of its own text."""
    engine = Engine.from_pretrained(
        policy, drafter="auto", learning=1.0, num_threads=1, max_sequences=16, max_context=400, profile=False,
        speculation="suffix",
    )  # fmt: skip
    assert engine.learning is not None
    engine.learning.budget.may_learn = lambda *, idle: False  # type: ignore[method-assign]
    ring = LessonRing(most_tokens=10 * num_tokens, passes=1)
    engine.learning._ring = engine.learning._recorder._ring = ring
    learn_from(engine, num_tokens)
    return ring.take(most_tokens=10 * num_tokens)


def shaped(policy: Any, layers: tuple[int, ...]) -> Any:
    model = copy.deepcopy(policy)
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in layers])
    model.config.num_hidden_layers = len(layers)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    return model


def learnt(policy: Any, name: str, lessons: list[Lesson], passes: int, folder: Path) -> Path:
    layers, num_learning = SHAPES[name]
    model = shaped(policy, layers).float()
    own = [f"model.layers.{index}." for index in range(len(layers) - num_learning)]
    fixed = (*own, "model.embed_tokens.", "lm_head.")
    names = {path for path, _ in model.named_parameters() if not path.startswith(fixed)}
    student, began = Student(model, names, max_context=400), time.process_time()
    for _ in range(passes):
        ring = LessonRing(most_tokens=sum(each.num_labels for each in lessons), passes=1)
        for lesson in lessons:
            ring.add(lesson)
        while taken := ring.take(most_tokens=LESSON_TOKENS):
            student.learn(taken)
    seconds = time.process_time() - began
    count = sum(dict(model.named_parameters())[path].numel() for path in names)
    model.load_state_dict(student.state_dict())
    model.bfloat16().save_pretrained(folder)
    print(f"{name}: {count / 1e6:.2f}M parameters learn, {seconds:.0f} s of learning", flush=True)
    return folder


def measure(engine: Engine, num_sequences: int, number: int, num_tokens: int) -> tuple[float, float, list[Any]]:
    """Tokens a second, tokens a verification, and the tokens."""
    prompts = [tuple(prompt) for prompt in library.prompts(num_sequences, seed=500 + number)]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    seeds = range(1000 * number, 1000 * number + num_sequences)
    began = time.perf_counter()
    done = engine.generate(prompts, params, seeds=seeds)
    seconds = time.perf_counter() - began
    count = sum(len(each.token_ids) for each in done)
    return (
        count / seconds,
        count / sum(each.stats.num_verifications for each in done),
        [each.token_ids for each in done],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=49152, help="to learn from")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8])
    given = parser.parse_args()
    torch.set_num_threads(1)
    models = ensure("library-wide")
    policy, lessons = load_model(models.library), recorded(models.library, given.tokens)
    with TemporaryDirectory() as scratch:
        engines = {
            name: Engine.from_pretrained(
                models.library_wide, drafter=learnt(policy, name, lessons, given.passes, Path(scratch) / name),
                dtype="float32", num_threads=1, max_sequences=max(given.sequences), max_context=400,
                speculation="adaptive",
            )
            for name in SHAPES
        }  # fmt: skip
    print("| sequences |", " | ".join(engines), "|")
    for num_sequences in given.sequences:
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        accepted: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(given.rounds + 1):
            tokens = []
            for name in engines if number % 2 else reversed(engines):
                speed, a_verification, made = measure(engines[name], num_sequences, number, 64 if number else 16)
                tokens.append(made)
                if number:  # the first is a warm-up
                    speeds[name].append(speed)
                    accepted[name].append(a_verification)
            assert all(each == tokens[0] for each in tokens), "a drafter changed a token"
        cells = [
            f"{sum(accepted[name]) / given.rounds:.2f}, {paired(speeds[name], speeds['first + one'])}"
            for name in engines
        ]
        print(f"| {num_sequences} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
