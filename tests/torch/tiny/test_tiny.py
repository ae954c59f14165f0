import hashlib
import json
import random
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from places import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import Dataset
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.file import read_job
from rlhfspec.tiny import MODEL_KINDS, check, models, paths, perturbed, random_model, resolve, sums, widened
from rlhfspec.tiny.corpus import documents, prompts, token_stream
from rlhfspec.tiny.muon import Muon
from rlhfspec.tiny.recipe import DRAFT, RECIPES, SUMS, SUMS_DRAFT, TARGET_RECIPE, WIDE, Recipe
from rlhfspec.tiny.tokenizer import BOS, EOS, PAD, VOCAB_SIZE, decode, encode, hugging_face_tokenizer
from rlhfspec.tiny.train import _lessons, _loss, build, train
from rlhfspec.training.data import load_rows

SHAPE = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
SMALL = Recipe(name="small", num_steps=60, batch_shapes=((4, 64),), corpus_tokens=20_000, **SHAPE)


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    assert decode([BOS, *encode(text), EOS]) == text


def test_hugging_face_tokenizer_has_the_same_ids() -> None:
    tokenizer = hugging_face_tokenizer()
    for text in ("Count from 1", "Grüße, 世界\n\t", "  two  spaces "):
        assert tokenizer(text).input_ids == [BOS, *encode(text)]
        assert tokenizer.decode(encode(text)) == text
    assert tokenizer.decode([BOS, *encode("word"), EOS], skip_special_tokens=True) == "word"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)


def test_corpus_is_seeded_and_its_arithmetic_is_true() -> None:
    text = " ".join(documents(400, seed=5))
    assert documents(3, seed=5) == documents(3, seed=5) != documents(3, seed=6)
    sums = re.findall(r"(\d+) \+ (\d+) = (\d+)\.", text)
    assert len(sums) > 50
    assert all(int(left) + int(right) == int(total) for left, right, total in sums)


def test_prompts_vary_and_end_before_a_word() -> None:
    chosen = prompts(50, seed=1)
    lengths = {len(prompt) for prompt in chosen}
    assert len(chosen) == 50
    assert len(lengths) > 20
    assert min(lengths) >= 24
    assert max(lengths) < 128
    assert all(prompt[0] == BOS and prompt[-1] == ord(" ") for prompt in chosen)
    assert all(0 <= token < VOCAB_SIZE for token in token_stream(5000, seed=2))


def held_out_loss(model: LlamaForCausalLM) -> float:
    tokens = torch.tensor(token_stream(2 * 64, seed=987_654)).view(2, 64)
    with torch.no_grad():
        return float(_loss(model, tokens[:, :-1], tokens[:, 1:], autocast=True))


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_muon_steps_like_that_of_torch_up_to_bfloat16(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    mine = Muon([ours], 0.02, momentum=0.9, weight_decay=0.1)
    twin = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        before = ours.detach().clone()
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in (mine, twin):
            optimizer.step()
        moved = (ours - before).norm()
        assert (ours - theirs).norm() < 0.02 * moved
        assert moved > 0
        theirs.data.copy_(ours.data)


def test_training_learns_and_leaves_bfloat16_weights() -> None:
    messages: list[str] = []
    model = train(SMALL, messages.append)
    untrained = build(SMALL, seed=1)
    assert held_out_loss(model) < held_out_loss(untrained) - 0.5
    assert all(torch.equal(p, p.to(torch.bfloat16).float()) for p in model.parameters())
    assert messages[-1].startswith("small: step 60/60")


def test_models_are_made_once_and_open_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_CACHE", str(tmp_path))
    folder = models.ensure_recipe(SMALL, report=lambda _: None)
    assert folder == tmp_path / "models" / SMALL.folder_name
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == VOCAB_SIZE
    assert AutoTokenizer.from_pretrained(folder)("a").input_ids == [BOS, ord("a")]

    def fail(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(models, "_make", fail)
    assert models.ensure_recipe(SMALL) == folder
    with pytest.raises(AssertionError, match="made again"):
        models.ensure_recipe(replace(SMALL, num_steps=61))


DIGESTS = {
    "sums": "80f1bf969636e143858ea568149944e76a241a10e6363de8a8c3efb168a9ab51",
    "sums-draft": "4579886634c394dcd98f2e10e667aa55bf06cfcc665b96d644077149336c8761",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_first_job_models_are_the_same_everywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*_: object) -> LlamaForCausalLM:
        raise AssertionError("trained here: run python -m rlhfspec.tiny.shipped after a change of the recipe")

    monkeypatch.setenv("RLHFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "train", trained)
    model = AutoModelForCausalLM.from_pretrained(resolve(f"tiny:{name}", lambda _: None), dtype=torch.bfloat16)
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == DIGESTS[name]


def test_a_failed_training_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> LlamaForCausalLM:
        raise KeyboardInterrupt

    monkeypatch.setenv("RLHFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.ensure_recipe(SMALL)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_widened_model_is_the_same_function_with_real_traffic() -> None:
    narrow = build(SMALL, seed=3).to(torch.float64).eval()
    wide = widened(narrow, 1000, seed=4).eval()
    tokens = torch.randint(VOCAB_SIZE, (2, 40))
    with torch.no_grad():
        assert torch.allclose(narrow(tokens).logits, wide(tokens).logits, rtol=0, atol=1e-12)
        mlp = wide.model.layers[0].mlp
        assert mlp.gate_proj.weight.shape == (1000, 32)
        assert mlp.gate_proj.weight[48:].std() > 0.5 * mlp.gate_proj.weight[:48].std()
        assert not mlp.down_proj.weight[:, 48:].any()
        mlp.down_proj.weight[:, 48:] = 0.1  # the extra columns do carry something: the test can fail
        assert not torch.allclose(narrow(tokens).logits, wide(tokens).logits, atol=1e-3)


def test_widened_model_saves_and_loads(tmp_path: Path) -> None:
    wide = widened(build(SMALL, seed=3), 100, seed=4)
    wide.save_pretrained(tmp_path)
    tokens = torch.randint(VOCAB_SIZE, (1, 9))
    with torch.no_grad():
        assert torch.equal(wide(tokens).logits, LlamaForCausalLM.from_pretrained(tmp_path)(tokens).logits)


def test_perturbed_model_agrees_partly() -> None:
    model = random_model("llama", seed=1)
    tokens = torch.randint(97, (4, 50))
    with torch.no_grad():
        choice = model(tokens).logits.argmax(-1)
        agreement = [(perturbed(model, s)(tokens).logits.argmax(-1) == choice).float().mean() for s in (0, 0.1, 3)]
    assert agreement[0] == 1
    assert 0.5 < agreement[1] < 1
    assert agreement[2] < 0.3


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_random_model_is_seeded_and_has_opinions(kind: str) -> None:
    model, again = random_model(kind, seed=1), random_model(kind, seed=1)
    tokens = torch.randint(97, (2, 30))
    with torch.no_grad():
        log_probs = model(tokens).logits.log_softmax(-1)
        assert torch.equal(log_probs, again(tokens).logits.log_softmax(-1))
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    assert 0.2 < entropy < 4.0
    assert not model.training


EXAMPLES = ROOT / "examples"
JOBS = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
digits = st.integers(1, 6).flatmap(
    lambda count: st.tuples(*[st.integers(0, 10**count - 1).map(lambda n: str(n).zfill(count))] * 2)
)


@given(digits)
def test_worked_sums_without_slips_are_right(pair: tuple[str, str]) -> None:
    text = sums.worked(*pair)
    assert sums.correct(text, sums.answer(*pair)) == 1.0
    assert sums.steps(text) == 1.0
    assert int(sums.answer(*pair)) == int(pair[0]) + int(pair[1])


@given(digits, st.integers(1, 9))
def test_a_wrong_answer_earns_nothing(pair: tuple[str, str], off_by: int) -> None:
    wrong = str(int(sums.answer(*pair)) + off_by).zfill(len(sums.answer(*pair)))
    assert sums.correct(f"answer {wrong}", sums.answer(*pair)) == 0.0


@pytest.mark.parametrize(
    "completion", ["", "answer", "answer 1234", "answer 12", "answer 123 ", "answer 123, answer 124", "answer 123."]
)
def test_only_the_answer_at_the_very_end_counts(completion: str) -> None:
    assert sums.correct(completion, "123") == 0.0


@pytest.mark.parametrize(
    ("step", "share"),
    [
        ("8+5=13 keep 3 carry 1", 1.0),
        ("8+5+1=14 keep 4 carry 1", 1.0),
        ("8+5=13 keep 3 carry 0", 0.0),
        ("8+5=13 keep 4 carry 1", 0.0),
        ("8+5=12 keep 2 carry 1", 0.0),
        ("18+5=13 keep 3 carry 1", 0.0),
        ("nonsense carry 1", 0.0),
    ],
)
def test_each_step_of_a_sum_is_judged_separately(step: str, share: float) -> None:
    assert sums.steps(step) == share


def test_slips_occur_and_later_steps_carry_them_on() -> None:
    rng = random.Random(1)
    texts = [sums.worked("4848", "7575", rng) for _ in range(300)]
    right = sum(text == sums.worked("4848", "7575") for text in texts) / len(texts)
    assert 0.7 < right < 0.95  # about (1 - SLIP_RATE) ** 4
    assert all(re.search(r"answer \d+$", text) for text in texts)


def test_data_is_seeded_true_and_of_many_lengths() -> None:
    rows = sums.rows(400, seed=3)
    assert rows == sums.rows(400, seed=3) != sums.rows(400, seed=4)
    for row in rows:
        left, right = row["prompt"].rstrip("=").split("+")
        assert int(left) + int(right) == int(row["answer"])
    assert {len(row["prompt"]) for row in rows} == {2 * count + 2 for count in sums.NUM_DIGITS}
    assert [json.loads(line) for line in sums.jsonl(400, seed=3).splitlines()] == rows


def test_lessons_have_targets_only_for_responses() -> None:
    for tokens, targets in islice(_lessons(SUMS), 3):
        assert (tokens[:, 0] == BOS).all()
        learnt = targets >= 0
        assert (targets[:, :-1][learnt[:, :-1]] == tokens[:, 1:][learnt[:, :-1]]).all()  # the next token
        for row, target in zip(tokens, targets, strict=True):
            taught = target[target >= 0]
            assert taught[-1] == EOS
            assert f"={decode(taught.tolist())}" in decode(row[row != PAD].tolist())
            assert "=" not in decode(row[: int((target >= 0).nonzero()[0])].tolist())


def test_training_on_lessons_lowers_the_loss() -> None:
    small = replace(SUMS_DRAFT, hidden_size=32, intermediate_size=48, num_steps=40)
    losses: list[str] = []
    train(small, losses.append)
    first, last = (float(re.search(r"([\d.]+) nats", line)[1]) for line in (losses[0], losses[-1]))  # type: ignore[index]
    assert last < first - 0.5


def test_folder_names_of_existing_recipes_do_not_change() -> None:
    names = {recipe.name: recipe.folder_name for recipe in (TARGET_RECIPE, DRAFT, WIDE)}
    assert names == {"target": "target-2e9955ebf3d2", "draft": "draft-2455cf378411", "wide": "wide-605a4117ec18"}
    assert len({recipe.folder_name for recipe in RECIPES.values()}) == len(RECIPES)


def test_tiny_names_become_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_CACHE", str(tmp_path))
    data = resolve("tiny:sums.jsonl")
    assert len(load_rows(Dataset(path=data), tmp_path).records) == paths.DATA["sums.jsonl"][0]
    assert [file.name for file in Path(data).parent.iterdir()] == ["sums.jsonl"]
    folder = tmp_path / "models" / RECIPES["sums-draft"].folder_name
    folder.mkdir(parents=True)
    assert resolve("tiny:sums-draft") == str(folder)  # there already: nothing is made


@pytest.mark.parametrize("name", ["tiny:", "tiny:sum", "sums", "tiny:tiny:sums", "tiny:../sums"])
def test_unknown_tiny_names_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidRequest, match="sums-draft"):
        check(name)
    with pytest.raises(InvalidRequest):
        resolve(name)


def test_every_algorithm_has_an_example() -> None:
    assert {read_job(EXAMPLES / name).spec.algorithm.name for name in JOBS} == {*ALGORITHMS}


def test_the_examples_readme_names_every_job() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}]({name})" in text for name in JOBS)


def test_no_held_out_sum_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_CACHE", str(tmp_path))
    files = [Path(paths.resolve(f"tiny:{name}")).read_text() for name in (paths.TRAINING, paths.HELD_OUT)]
    data, held_out = ({json.loads(line)["prompt"] for line in text.splitlines()} for text in files)
    assert len(files[1].splitlines()) == paths.DATA[paths.HELD_OUT][0]
    assert not data & held_out
