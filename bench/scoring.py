"""Measure how much scorers gain by running a prompt once for all its responses: python bench/scoring.py [--answers 16].

Two of each scorer, one of which keeps prompts, score the same groups with interleaved responses. Printed are median CPU
milliseconds per sample, and how far the scores are apart. Models are synthetic: `target` (3.3M parameters) or `wide`
(77M).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlhfspec.job import Model
from rlhfspec.kernels.cpu import build
from rlhfspec.tiny.models import ensure
from rlhfspec.training.modeling.critic import load_critic
from rlhfspec.training.modeling.loading import load_reference
from rlhfspec.training.scoring.log_probs import LogProbScorer
from rlhfspec.training.scoring.rewards.classifier import Classifier
from rlhfspec.training.scoring.values import ValueScorer

Sample = tuple[list[int], list[int]]
Score = Callable[[Sequence[int], Sequence[int]], Any]
NUM_GROUPS = 3


def samples_of(given: argparse.Namespace, turn: int) -> list[Sample]:
    """Return new random samples, so that no prompt is kept from an earlier round."""
    drawn = random.Random(turn)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(3, 250) for _ in range(count)]

    prompts = [tokens(given.prompt) for _ in range(NUM_GROUPS)]
    samples = [(prompt, tokens(given.answer)) for prompt in prompts for _ in range(given.answers)]
    drawn.shuffle(samples)
    return samples


def references(path: str, most: int) -> list[Score]:
    return [
        LogProbScorer(
            load_reference(Model(path=path), max_context=most), temperature=1.0, max_context=most, keep_prompts=keep
        ).log_probs
        for keep in (True, False)
    ]


def critics(path: str, most: int) -> list[Score]:
    critic = load_critic(Model(path=path), max_context=most)
    with torch.no_grad():  # a new critic returns zero
        critic.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return [ValueScorer(critic, max_context=most, keep_prompts=keep).values for keep in (True, False)]


def rewards(path: str, most: int) -> list[Score]:
    """Return scorers whose scores differ by rounding, because torch's arithmetic depends on the number of rows."""
    config = AutoConfig.from_pretrained(path, num_labels=1, max_position_embeddings=most)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()

    def scored_by(keep_prompts: bool) -> Score:
        classifier = Classifier(model, keep_prompts=keep_prompts, name="bench")
        return lambda prompt, answer: classifier.logits([*prompt, *answer], len(prompt)).tolist()

    return [scored_by(True), scored_by(False)]


def timed(score: Score, samples: Sequence[Sample]) -> tuple[float, torch.Tensor]:
    began = time.process_time()
    numbers = [score(*sample) for sample in samples]
    return (time.process_time() - began) / len(samples), torch.tensor(numbers, dtype=torch.float64)


def compare(name: str, scorers: list[Score], given: argparse.Namespace) -> None:
    seconds: list[tuple[float, float]] = []
    apart = 0.0
    for turn in range(given.rounds):
        samples = samples_of(given, turn)
        keeping, found = timed(scorers[0], samples)
        whole, expected = timed(scorers[1], samples)
        seconds.append((whole, keeping))
        apart = max(apart, float((found - expected).abs().max()))
    ratio = median(whole / keeping for whole, keeping in seconds)
    before, after = (1e3 * median(column) for column in zip(*seconds, strict=True))
    bits = f"at most {apart:.1e} apart" if apart else "the same bits"
    print(f"{name:<10} {before:7.2f} -> {after:6.2f} ms a sample: {ratio:.2f}x, {bits}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", default="target", help="target (3.3M parameters) or wide (77M)")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of a prompt")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    build.set_num_threads(1)
    path = str(getattr(ensure(given.tiny), given.tiny))
    print(
        f"{given.tiny}: {NUM_GROUPS} prompts of {given.prompt} tokens, {given.answers} answers of {given.answer} each"
    )
    for name, made in (("reference", references), ("critic", critics), ("reward", rewards)):
        compare(name, made(path, given.prompt + given.answer), given)


if __name__ == "__main__":
    main()
