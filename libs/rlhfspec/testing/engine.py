"""Contract of engines. Tokens (docs/law.md) are checked against the independent `rlhfspec.engine.oracle`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rlhfspec.engine import oracle
from rlhfspec.engine.base import Completion, EngineProtocol, EngineStep, Gain, Request
from rlhfspec.engine.params import SamplingParams
from rlhfspec.errors import InvalidRequest, WeightsVersionError
from rlhfspec.tiny import perturbed, random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3), (7,) * 20, (4,), (1, 2, 3, 1, 2, 3, 1, 2))
BAD_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (  # the wrong field, and a bad request
    ("id", {"name": ""}),
    ("prompt_token_ids", {"prompt": ()}),
    ("prompt_token_ids", {"prompt": (1, VOCAB_SIZE)}),
    ("prompt_token_ids", {"prompt": (-1,)}),
    ("prompt_token_ids", {"prompt": (1.5,)}),
    ("seed", {"seed": 1 << 64}),
)
_MOST_STEPS = 500  # an engine that spins is a failure, not a hang
NEAR_TIE = 1e-5  # of two perturbed scores in float32, whose order the order of sums may decide


@functools.cache
def reference() -> Any:
    """Return the suite's model, which tests must not modify."""
    return random_model("llama", seed=3, vocab_size=VOCAB_SIZE, num_layers=3, head_dim=32)


def request(
    name: str, prompt: tuple[int, ...] = (1, 2, 3), *, seed: int = 7, weights_version: int | None = None, **params: Any
) -> Request:
    chosen = SamplingParams(**{"max_tokens": 16, "ignore_eos": True} | params)
    return Request(id=name, prompt_token_ids=prompt, params=chosen, seed=seed, weights_version=weights_version)


def bits(done: Completion) -> tuple[object, ...]:
    return done.token_ids, done.log_probs, done.tempered_log_probs, done.finish_reason


class GainStreams:
    def __init__(self) -> None:
        self._gains: dict[str, list[Gain]] = {}

    def take(self, report: EngineStep) -> EngineStep:
        for gain in report.gains:
            known = self._gains.setdefault(gain.id, [])
            assert not known or known[-1].finish_reason is None, f"{gain.id} has ended"
            assert len(gain.token_ids) or gain.finish_reason, f"{gain.id} got no token and did not end"
            known.append(gain)
        return report

    def check(self, done: Completion) -> None:
        gains = self._gains.pop(done.id)
        assert gains[-1].finish_reason == done.finish_reason
        for name in ("token_ids", "log_probs", "tempered_log_probs"):
            told = np.concatenate([getattr(gain, name) for gain in gains])
            np.testing.assert_array_equal(told, np.asarray(getattr(done, name), told.dtype), f"{name} of {done.id}")


def drain(engine: EngineProtocol) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    for _ in range(_MOST_STEPS):
        engine.check_integrity()
        if not engine.has_work:
            return done
        for each in engine.step().finished:
            assert each.id not in done, "a sequence finishes once"
            done[each.id] = each
    raise AssertionError("the engine has work left but does not finish it")


def run(engine: EngineProtocol, *requests: Request) -> dict[str, Completion]:
    for each in requests:
        engine.submit(each)
    return drain(engine)


@torch.inference_mode()
def log_probs_of(model: Any, done: Completion) -> np.ndarray[Any, Any]:
    logits = model(input_ids=torch.tensor([[*done.prompt_token_ids, *done.token_ids]]), use_cache=False).logits[0]
    picked = logits.float().log_softmax(-1)[len(done.prompt_token_ids) - 1 : -1]
    found: np.ndarray[Any, Any] = picked[torch.arange(len(done.token_ids)), torch.tensor(done.token_ids)].numpy()
    return found


class EngineMaker:
    """Base of the engine suites, whose tests run in all `modes` of speculation."""

    modes: ClassVar[tuple[Any, ...]] = ("off",)
    log_prob_tolerance: ClassVar[float] = 0.0  # above 0 if a row's numbers depend on the other rows

    def wanted(self, done: Completion) -> tuple[object, ...]:
        """Return the expected `bits`, within the tolerance, of the same sequence in another batch."""
        near = functools.partial(pytest.approx, rel=0.0, abs=self.log_prob_tolerance)
        return done.token_ids, near(done.log_probs), near(done.tempered_log_probs), done.finish_reason

    def make(self, model: Any, mode: Any) -> EngineProtocol:
        """Return a new float32 engine for eight sequences of 96 tokens, which may keep the model."""
        raise NotImplementedError

    def engine(self, mode: Any, model: Any = None) -> EngineProtocol:
        return self.make(copy.deepcopy(reference() if model is None else model), mode)

    def engines(self) -> Iterator[EngineProtocol]:
        return (self.engine(mode) for mode in self.modes)


class EngineContract(EngineMaker):
    has_masks: ClassVar[bool] = True  # False: it refuses top_k and top_p
    is_greedy_too: ClassVar[bool] = True  # False: it refuses a temperature of 0
    has_stop_strings: ClassVar[bool] = True  # False: it refuses stop strings

    def mixed(self, temperature: float) -> list[Request]:
        if temperature == 0 and not self.is_greedy_too:
            pytest.skip("the engine says that it refuses a temperature of 0")
        requests = []
        for seed, prompt in enumerate(PROMPTS * 2):
            masks = {"top_k": 9, "top_p": 0.9} if self.has_masks and seed % 3 == 2 else {}
            params: dict[str, Any] = {"temperature": temperature, "max_tokens": 6 + 3 * seed, **masks}
            requests.append(request(f"r{seed}", prompt, seed=seed, **params))
        return requests

    # ---- the law ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
    def test_tokens_are_those_of_the_slow_decoder(self, temperature: float) -> None:
        model = copy.deepcopy(reference())
        model.set_attn_implementation("eager")
        truths: dict[tuple[str, tuple[int, ...]], oracle.OracleTokens] = {}  # shared by modes of equal tokens
        for mode in self.modes:
            requests = self.mixed(temperature)
            done = run(self.engine(mode), *requests)
            for each in requests:
                ours = done[each.id]
                forced = list(ours.token_ids)
                if (told := (each.id, ours.token_ids)) not in truths:
                    prompt = list(each.prompt_token_ids)
                    truths[told] = oracle.decode(model, prompt, each.params, each.seed, forced=forced)
                truth = truths[told]
                for token, expected, margin in zip(forced, truth.token_ids, truth.margins, strict=True):
                    assert token == expected or margin < NEAR_TIE, f"{mode}, {each.id}: a margin of {margin}"
                np.testing.assert_allclose(ours.log_probs, truth.log_probs, atol=1e-5)

    @pytest.mark.parametrize("temperature", [1.0, 0.0])
    def test_a_sequence_is_the_same_bits_alone_and_among_others(self, temperature: float) -> None:
        requests = self.mixed(temperature)
        plain = self.engine(self.modes[0])
        alone = {each.id: self.wanted(run(plain, each)[each.id]) for each in requests}
        for mode in self.modes:
            engine, done, waiting = self.engine(mode), dict[str, Completion](), requests[::-1]
            while waiting or engine.has_work:  # two arrive between any two steps
                for each in waiting[:2]:
                    engine.submit(each)
                waiting = waiting[2:]
                done |= {each.id: each for each in engine.step().finished}
            assert {name: bits(each) for name, each in done.items()} == alone, mode

    def test_another_seed_gives_other_tokens_and_the_same_seed_the_same(self) -> None:
        for engine in self.engines():
            done = run(engine, *(request(name, seed=seed, max_tokens=24) for name, seed in zip("abc", (5, 5, 6))))  # noqa: B905
            assert bits(done["a"]) == self.wanted(done["b"])
            assert done["a"].token_ids != done["c"].token_ids

    # ---- what comes out ---------------------------------------------------------------------------------------------

    def test_a_completion_tells_all_of_its_tokens(self) -> None:
        for engine in self.engines():
            done = run(engine, request("x", temperature=0.5))["x"]
            assert (done.id, done.prompt_token_ids, done.finish_reason, done.error) == ("x", (1, 2, 3), "length", "")
            assert {len(done.token_ids), len(done.log_probs), len(done.tempered_log_probs)} == {16}
            assert done.weights_versions == (engine.weights_version,) * 16
            assert max(done.log_probs) <= 0
            assert sum(done.tempered_log_probs) > sum(done.log_probs), "the tempered distribution is sharper"
            plain = run(engine, request("y", temperature=1.0))["y"]
            np.testing.assert_allclose(plain.tempered_log_probs, plain.log_probs, atol=1e-5)

    def test_a_stop_token_is_the_last_one(self) -> None:
        for engine in self.engines():
            free = run(engine, request("free", max_tokens=30))["free"].token_ids
            stopped = run(engine, request("stopped", max_tokens=30, stop_token_ids=(free[11],)))["stopped"]
            assert stopped.finish_reason == "stop"
            assert stopped.token_ids == free[: free.index(free[11]) + 1]
            assert {len(stopped.log_probs), len(stopped.weights_versions)} == {len(stopped.token_ids)}

    def test_the_models_own_end_token_stops_unless_ignored(self) -> None:
        model = copy.deepcopy(reference())
        for mode in self.modes:
            free = run(self.engine(mode), request("free", max_tokens=20))["free"].token_ids
            model.generation_config.eos_token_id = model.config.eos_token_id = free[6]
            engine = self.engine(mode, model)
            ended = run(engine, request("ended", max_tokens=20, ignore_eos=False))["ended"]
            assert ended.token_ids == free[: free.index(free[6]) + 1]
            assert ended.finish_reason == "stop"
            assert run(engine, request("ignored", max_tokens=20))["ignored"].token_ids == free

    def test_cancelled_is_forgotten_and_the_others_go_on(self) -> None:
        for engine in self.engines():
            for index in range(12):  # more than fit
                engine.submit(request(f"r{index}", seed=index))
            assert engine.cancel("r3")
            assert not engine.cancel("r3")
            assert not engine.cancel("unknown")
            first = {each.id for each in engine.step().finished}
            last = next(name for name in ("r11", "r10", "r2") if name not in first)
            assert engine.cancel(last)
            assert first | set(drain(engine)) == {f"r{index}" for index in range(12)} - {"r3", last}
            assert "r3" in run(engine, request("r3")), "the id of a cancelled request is free again"

    def test_it_says_what_it_can(self) -> None:
        for engine in self.engines():
            abilities = engine.abilities
            assert abilities.moves_tokens in (None, engine)
            assert abilities.moves_kv in (None, abilities.moves_tokens)
            assert engine.reports is not None

    def test_stats_add_up(self) -> None:
        for engine in self.engines():
            assert not engine.has_work
            assert engine.stats().room > 0
            for index in range(3):
                engine.submit(request(f"r{index}", seed=index))
            assert (engine.stats().num_waiting, engine.has_work) == (3, True)
            done = drain(engine)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.num_free_blocks == stats.num_blocks
            assert stats.num_generated_tokens == sum(len(each.token_ids) for each in done.values())
            assert stats.num_steps > 0
            assert stats.weights_version == engine.weights_version

    # ---- what comes out step by step --------------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", [1, 20, 300])
    def test_gains_are_the_tokens_of_the_completions(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        for engine in self.engines():
            asked = [request(f"r{index}", PROMPTS[index % 4], seed=seed + index) for index in range(6)]
            free = self._streamed(engine, asked, draw)
            ended = self._streamed(engine, [self._ended(free[each.id], each.seed, draw) for each in asked], draw)
            for name, done in ended.items():
                assert done.token_ids == free[name].token_ids[: len(done.token_ids)]

    def _streamed(
        self, engine: EngineProtocol, requests: list[Request], draw: np.random.Generator
    ) -> dict[str, Completion]:
        streams, done, waiting = GainStreams(), dict[str, Completion](), list(requests)
        while waiting or engine.has_work:
            for _ in range(min(int(draw.integers(1, 3)), len(waiting))):
                engine.submit(waiting.pop())
            report = streams.take(engine.step())
            assert sum(len(gain.token_ids) for gain in report.gains) == report.num_committed
            assert {gain.id for gain in report.gains if gain.finish_reason} == {each.id for each in report.finished}
            done |= {each.id: each for each in report.finished}
        for each in done.values():
            streams.check(each)
        return done

    def _ended(self, free: Completion, seed: int, draw: np.random.Generator) -> Request:
        token = free.token_ids[int(draw.integers(len(free.token_ids)))]
        ends: list[dict[str, Any]] = [{}, {"max_tokens": int(draw.integers(1, 16))}, {"stop_token_ids": (token,)}]
        if self.has_stop_strings and free.text:
            begin = int(draw.integers(len(free.text)))
            ends += [{"stop": (free.text[begin : begin + int(draw.integers(1, 4))],)}] * 2
        return request(free.id, free.prompt_token_ids, seed=seed, **ends[int(draw.integers(len(ends)))])

    def test_a_sequence_that_new_weights_end_is_told_to_have_ended(self) -> None:
        for engine in self.engines():
            streams = GainStreams()
            engine.submit(request("pinned", weights_version=0))
            done = [*streams.take(engine.step()).finished]
            engine.load_weights(reference().state_dict(), version=1)
            while engine.has_work:
                done += streams.take(engine.step()).finished
            [ended] = done
            assert ended.finish_reason in ("error", "length")
            streams.check(ended)

    # ---- what is refused --------------------------------------------------------------------------------------------

    def test_a_bad_request_names_its_field_and_harms_no_other(self) -> None:
        for engine in self.engines():
            engine.submit(request("good", max_tokens=4))
            for field, changes in BAD_REQUESTS:
                with pytest.raises(InvalidRequest) as caught:
                    engine.submit(request(**{"name": "bad", **changes}))
                assert caught.value.field == field, changes
            assert set(drain(engine)) == {"good"}

    def test_a_request_for_other_weights_is_refused(self) -> None:
        for engine in self.engines():
            engine.load_weights(reference().state_dict(), version=2)
            with pytest.raises(WeightsVersionError, match="wanted 1, have 2"):
                engine.submit(request("old", weights_version=1))
            assert set(run(engine, request("pinned", weights_version=2))) == {"pinned"}

    # ---- new weights ------------------------------------------------------------------------------------------------

    def test_versions_of_weights_grow(self) -> None:
        for engine in self.engines():
            assert engine.weights_version == 0
            engine.load_weights(reference().state_dict(), version=2)
            for version in (1, 2):
                with pytest.raises(WeightsVersionError, match="must grow"):
                    engine.load_weights(reference().state_dict(), version=version)
            assert engine.weights_version == engine.stats().weights_version == 2

    def test_after_new_weights_tokens_are_theirs(self) -> None:
        newer = perturbed(reference(), 0.3)
        requests = self.mixed(1.0)
        for mode in self.modes:
            engine = self.engine(mode)
            before = run(engine, *requests)
            engine.load_weights(newer.state_dict(), version=1)
            after, expected = run(engine, *requests), run(self.engine(mode, newer), *requests)
            assert {name: bits(each) for name, each in after.items()} == {
                name: self.wanted(each) for name, each in expected.items()
            }
            assert {each.weights_versions for each in after.values()} != {
                each.weights_versions for each in before.values()
            }
            assert all(set(each.weights_versions) == {1} for each in after.values())

    def test_new_weights_take_over_between_steps(self) -> None:
        models = {0: reference(), 4: perturbed(reference(), 0.3)}
        for engine in self.engines():
            requests = [request(f"r{seed}", prompt, seed=seed, max_tokens=30) for seed, prompt in enumerate(PROMPTS)]
            for asked in requests:
                engine.submit(asked)
            done = [*engine.step().finished, *engine.step().finished] if engine.has_work else []
            engine.load_weights(models[4].state_dict(), version=4)
            done += drain(engine).values()
            assert len(done) == len(requests)
            for each in done:
                versions = np.asarray(each.weights_versions)
                assert (np.diff(versions) >= 0).all()
                assert set(versions.tolist()) <= {0, 4}
                for version, model in models.items():
                    chosen = versions == version
                    expected = log_probs_of(model, each)[chosen]
                    np.testing.assert_allclose(np.asarray(each.log_probs)[chosen], expected, atol=2e-5)
