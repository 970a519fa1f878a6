"""`task: dpo`: its references, its losses in a whole run, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from running import run, write_job
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from stoker.cli.main import main
from stoker.data.sequences import Document
from stoker.data.token_cache import Row
from stoker.errors import UserError
from stoker.hardware.cache_folder import cache_folder
from stoker.job.load_job import load_job
from stoker.models.attention.collate import pack
from stoker.models.dropout import has_dropout
from stoker.train.engine import Counts
from stoker.train.language.language_task import LanguageTask
from stoker.train.preference import reference_scores
from stoker.train.preference.kto_mismatched import mismatched_pairs
from stoker.train.preference.reference_model import ReferenceModel, sums
from stoker.train.preference.reference_scores import ReferenceScores
from stoker.train.preference.reference_table import ReferenceTable, row_key
from stoker.train.task import Part
from stoker.train.tasks.dpo import ResolvedDpoBlock
from tiny_llama import save_tiny_llama

ROWS, HELD_OUT = 20, 4
WORDS = ["sea", "wind", "poem", "capital"]
LORA = {"method": "lora", "rank": 4}


@pytest.fixture
def dpo(base: Path, sft: dict[str, Any]) -> dict[str, Any]:
    """A job of pairs: answers that name the word are chosen."""
    with (base / "pairs.jsonl").open("w") as file:
        for i in range(ROWS):
            question = f"What is {WORDS[i % 4]} {i}?"
            answers = {"chosen": f"It is {WORDS[-i % 4]} " * (1 + i % 3), "rejected": f"I do not know {i}."}
            file.write(json.dumps({"prompt": question, **answers}) + "\n")
    with (base / "judged.jsonl").open("w") as file:
        for i in range(ROWS):
            answer = f"It is {WORDS[i % 4]}." if i % 3 else f"I do not know {i}."
            file.write(json.dumps({"prompt": f"What is {i}?", "completion": answer, "label": i % 3 > 0}) + "\n")
    evaluate = {"fraction": 0.2, "every": 4}
    train = {**sft["train"], "lr": 3e-3}
    return {
        **sft, "task": "dpo", "data": "pairs.jsonl", "steps": 8, "evaluate": evaluate, "output": "runs/dpo",
        "tune": LORA, "train": train,
    }  # fmt: skip


def judged(job: dict[str, Any]) -> dict[str, Any]:
    return {**job, "data": "judged.jsonl", "dpo": {"loss": "kto", **job.get("dpo", {})}}


def evaluations(ran: Any) -> list[dict[str, Any]]:
    return [event for event in ran.folder.read_events() if event["event"] == "evaluated"]


def alone(model: Any, ids: Tensor, trained: Tensor) -> Tensor:
    """The log-probability of the trained tokens of a row, by transformers alone."""
    log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return log_p[trained[1:]].sum()


def row_of(prompt: int, answer: int, begin: int) -> Document:
    """A document of these numbers of tokens, counted from ``begin``."""
    ids = np.arange(begin, begin + prompt + answer, dtype=np.uint32)
    return Document(Row(ids, np.arange(len(ids)) >= prompt), 0, 0)


def test_a_mismatched_answer_is_that_of_the_next_row() -> None:
    first, second, after = row_of(3, 2, 10), row_of(5, 8, 20), row_of(1, 2, 50)
    found = [(d.row.ids.tolist(), d.row.trained.tolist()) for d in mismatched_pairs([first, second], after)]
    assert found == [
        ([10, 11, 12, *range(25, 33)], [False] * 3 + [True] * 8),
        ([20, 21, 22, 23, 24, 51, 52], [False] * 5 + [True] * 2),
    ]
    (cut,) = mismatched_pairs([row_of(6, 1, 10)], row_of(2, 6, 50))
    assert cut.row.ids.tolist() == [*range(10, 16), 52, 53]  # as long as the longer of the two
    turns = Document(Row(np.arange(50, 56, dtype=np.uint32), np.array([0, 1, 1, 0, 0, 1], bool)), 0, 0)
    (several,) = mismatched_pairs([row_of(2, 2, 10)], turns)  # what is not trained between two answers stays so
    assert several.row.ids.tolist() == [10, 11, 51, 52, 53, 54]
    assert several.row.trained.tolist() == [False, False, True, True, False, False]
    (plain,) = mismatched_pairs([row_of(0, 3, 10)], row_of(0, 3, 50))  # nothing predicts a first token
    assert (plain.row.ids.tolist(), plain.row.trained.tolist()) == ([10, 51, 52], [False, True, True])


def test_the_kl_of_judged_answers_is_a_mean_of_at_least_0() -> None:
    block = ResolvedDpoBlock(
        loss="kto", reference="precomputed", beta=0.1, length_normalise=False, sft_weight=0.0, margin=0.0
    )
    rows = [(np.arange(4, dtype=np.uint32), np.arange(4) >= 2)] * 2
    part = Part(pack(rows, torch.device("cpu"), share=False), targets=2, tokens=8)
    for ratios, expected in (((3.0, 4.0), 0.75), ((-3.0, 4.0), 0.0)):
        engine: Any = SimpleNamespace(
            count=lambda parts: Counts(0, 0, len(parts), 0),
            read=lambda *_, ratios=ratios: [torch.tensor(ratios)],
            add_up=lambda alike, each: torch.cat([alike, each]),
        )
        (found,) = ReferenceScores(None, None, block).of_passes([part], engine, 1)  # type: ignore[arg-type]
        assert found.row.given["kl"].tolist() == [expected] * 2


def test_a_row_has_a_log_probability_for_each_loss_mask() -> None:
    one, other = row_of(3, 2, 10), row_of(2, 3, 10)
    table = ReferenceTable()
    table.add([row_key(one.row)], np.array([-1.0]))
    assert table.missing([one, other, other]) == [other]
    table.add([row_key(other.row), row_key(one.row)], np.array([-2.0, -3.0]))  # the first value stays
    assert table.of([other, one]).tolist() == [-2.0, -1.0]


def test_a_run_prefers_what_is_chosen(dpo: dict[str, Any], base: Path) -> None:
    ran = run(base, dpo)
    first, last = evaluations(ran)[0], evaluations(ran)[-1]
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4) and first["margin"] == pytest.approx(0, abs=1e-6)
    assert last["loss"] < first["loss"] and last["margin"] > 0 and last["accuracy"] == 1.0
    lines = ran.folder.read_metrics()
    assert {"chosen_reward", "rejected_reward", "margin", "accuracy"} <= lines[-1].keys()
    assert lines[-1]["margin"] == pytest.approx(lines[-1]["chosen_reward"] - lines[-1]["rejected_reward"], abs=1e-6)


@pytest.mark.parametrize("loss", ["ipo", "hinge", "robust", "simpo", "orpo", "kto"])
@pytest.mark.often("sigmoid", "kto", then="slow")
def test_every_loss_falls(loss: str, dpo: dict[str, Any], base: Path) -> None:
    block = {"loss": loss, **({"label_smoothing": 0.1} if loss == "robust" else {})}
    job = {**dpo, "dpo": block}
    ran = run(base, judged(job) if loss == "kto" else job)
    first, last = evaluations(ran)[0], evaluations(ran)[-1]
    assert last["loss"] < first["loss"] and last["margin"] > first.get("margin", 0.0)


@pytest.mark.parametrize("named", ["auto", "none"])
def test_the_reference_is_the_model_without_its_adapter_or_none(
    named: str, dpo: dict[str, Any], base: Path, tiny_model: Path
) -> None:
    ran = run(base, {**dpo, "dpo": {"beta": 0.5, "reference": named}})
    task, corpus = ran.prepared.task, ran.prepared.corpus
    assert isinstance(task, LanguageTask) and corpus is not None
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    documents = corpus.evaluation_documents()[:2]
    (part,) = task.complete(task.lay_out(documents), ran.prepared.engine, 1)
    rows = [(torch.tensor(d.row.ids.astype("int64")), torch.tensor(d.row.trained)) for d in documents]
    with torch.no_grad():
        expected = torch.stack([alone(plain, *row) for row in rows])
        if named == "none":
            expected = torch.zeros_like(expected)
        else:
            torch.testing.assert_close(part.inputs.given["reference"], expected, rtol=1e-5, atol=1e-4)
        tuned = torch.stack(ran.prepared.engine.read([part], sums, 1))[0]
        with task.around(part):
            loss = task.loss(part).total
    chosen, rejected = (0.5 * (tuned - expected)).tolist()
    assert float(loss) == pytest.approx(-float(logsigmoid(torch.tensor(chosen - rejected))), abs=1e-4)


@pytest.mark.parametrize("kind", ["pairs", "judged"])
@pytest.mark.slow
def test_precomputed_is_adapter_off(kind: str, dpo: dict[str, Any], base: Path) -> None:
    job = judged(dpo) if kind == "judged" else dpo
    found = {}
    for name in ("adapter-off", "precomputed"):
        block = {**job.get("dpo", {}), "reference": name}
        found[name] = run(base, {**job, "dpo": block, "output": f"runs/{name}"})
    assert found["adapter-off"].losses == pytest.approx(found["precomputed"].losses, abs=1e-5)


@pytest.mark.slow
def test_full_tuning_resumes_on_the_first_weights(
    dpo: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(base / "cache"))
    full = {**dpo, "tune": "full", "checkpoint": {"every": 4}}
    whole = run(base, full)
    assert load_job(write_job(base, full)).job.dpo.reference == "precomputed"
    (table,) = (cache_folder() / "reference").glob("*.npy")
    computed: list[int] = []
    by_engine = reference_scores._by_engine
    monkeypatch.setattr(reference_scores, "_by_engine", lambda *a: computed.append(len(a[-1])) or by_engine(*a))
    half = run(base, {**full, "steps": 4, "output": "runs/half", "train": {**full["train"], "schedule": "constant"}})
    assert not computed  # kept by content
    table.unlink()
    rest = run(base, {**full, "output": "runs/half", "train": {**full["train"], "schedule": "constant"}})
    assert computed == [2 * ROWS]  # with the first weights, before the checkpoint was restored
    straight = run(base, {**full, "output": "runs/straight", "train": {**full["train"], "schedule": "constant"}})
    assert half.outcome.step == 4 and rest.losses == straight.losses
    assert whole.losses[0] == pytest.approx(0.6931, abs=1e-4)
    last, expected = rest.last_state(), straight.last_state()
    assert all(torch.equal(expected.tensors[name], tensor) for name, tensor in last.tensors.items())


@pytest.mark.slow
def test_another_model_is_the_reference(dpo: dict[str, Any], base: Path, tiny_model: Path) -> None:
    same = run(base, {**dpo, "dpo": {"reference": str(tiny_model)}, "output": "runs/same"})
    own = run(base, {**dpo, "output": "runs/own"})
    assert same.losses == pytest.approx(own.losses, abs=1e-5)
    of_run = run(base, {**dpo, "dpo": {"reference": "runs/own"}, "output": "runs/of-run"})
    assert of_run.losses[0] > 0.75  # the reference has learnt these pairs: the policy is behind it
    digests = set()
    for precision in ("fp32", "bf16"):  # its log-probabilities are stored by this digest
        loaded = load_job(write_job(base, {**dpo, "train": {**dpo["train"], "precision": precision}}))
        digests.add(ReferenceModel(loaded, base, "runs/own").digest())
    assert len(digests) == 2


def test_prefixes_are_compared_with_the_model_without_them(dpo: dict[str, Any], base: Path) -> None:
    ran = run(base, {**dpo, "tune": {"method": "prompt", "tokens": 4}})
    assert evaluations(ran)[0]["margin"] != 0.0 and ran.outcome.step == 8


def test_stoker_eval_measures_pairs(
    dpo: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    for tune in ("full", LORA):
        ran = run(base, {**dpo, "tune": tune, "output": "runs/one"})
        assert main(["eval", "runs/one", "--json"]) == 0
        found, last = json.loads(capsys.readouterr().out), evaluations(ran)[-1]
        for name in ("loss", "chosen_reward", "rejected_reward", "margin", "accuracy"):
            assert found[name] == pytest.approx(last[name], abs=1e-5), name
        assert main(["eval", "runs/one", "pairs.jsonl", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["pairs"] == ROWS
        shutil.rmtree(base / "runs/one")


def test_stoker_eval_measures_judged_answers(
    dpo: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    ran = run(base, judged(dpo))
    assert main(["eval", "runs/dpo", "--json"]) == 0
    found, last = json.loads(capsys.readouterr().out), evaluations(ran)[-1]
    assert {name: found[name] for name in ("loss", "accuracy", "kl", "margin")} == pytest.approx(
        {name: last[name] for name in ("loss", "accuracy", "kl", "margin")}, abs=1e-5
    )
    assert found["answers"] == last["targets"] and "answer_accuracy" in found
    assert ran.prepared.audit is not None and ran.prepared.audit.rows_dropped == 0  # bad answers are kept


def test_the_models_dropout_is_off(dpo: dict[str, Any], base: Path, tiny_model: Path, tokenizer: Any) -> None:
    config = GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(base / "gpt2")
    ran = run(base, {**dpo, "model": {"name": "gpt2", "tokenizer": str(tiny_model)}, "steps": 1})
    assert ran.prepared.task.model.training and not has_dropout(ran.prepared.task.model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dpo": {"beta": 0}}, "dpo.beta"),
        ({"dpo": {"label_smoothing": 0.5}}, "dpo.label_smoothing"),
        ({"dpo": {"reference": "adapter-off"}, "tune": "full"}, "no adapter to switch off"),
        ({"dpo": {"loss": "orpo", "reference": "precomputed"}}, "without a reference"),
        ({"dpo": {"loss": "kto", "reference": "none"}}, "with a reference"),
        ({"dpo": {"margin": 1.0}}, "no effect with `loss: sigmoid`"),
        ({"dpo": {"good_weight": 2.0}}, "it belongs to kto"),
        ({"dpo": {"loss": "ipo", "label_smoothing": 0.1}}, "no effect with `loss: ipo`"),
        ({"dpo": {"loss": "simpo", "length_normalise": False}}, "means over tokens"),
        ({"dpo": {"loss": "kto", "sft_weight": 1.0}}, "no chosen answer"),
        ({"dpo": {"loss": "robust"}}, "without `label_smoothing` is `loss: sigmoid`; write label_smoothing: 0.1"),
        ({"data": [{"path": "judged.jsonl", "too_long": "split"}], "dpo": {"loss": "kto"}}, "answers with a label"),
    ],
)
def test_what_is_wrong_in_the_job_is_said(change: dict[str, Any], said: str, dpo: dict[str, Any], base: Path) -> None:
    with pytest.raises(UserError) as error:
        load_job(write_job(base, {**dpo, **change}))
    assert said in str(error.value)


def test_rows_of_another_kind_are_refused(dpo: dict[str, Any], base: Path) -> None:
    with pytest.raises(UserError, match="trains on pairs, chosen and rejected"):
        run(base, {**dpo, "data": "rows.jsonl"})
    with pytest.raises(
        UserError, match="its rows are pairs, chosen and rejected; task dpo trains on answers with a label"
    ):
        run(base, {**dpo, "dpo": {"loss": "kto"}})
    with pytest.raises(UserError, match="its rows are one answer a row; task dpo trains on answers with a label"):
        run(base, {**judged(dpo), "data": "rows.jsonl"})
    with pytest.raises(UserError, match="`task: dpo` with `loss: kto` trains on labels") as caught:
        run(base, {**judged(dpo), "dpo": {}})
    assert len(caught.value.problems) == 1


def test_a_reference_of_another_tokenizer_is_refused(dpo: dict[str, Any], base: Path) -> None:
    with pytest.raises(UserError, match="another tokenizer"):
        run(base, {**dpo, "dpo": {"reference": "llama-3m"}})


@pytest.mark.parametrize("reference", ["short", "of_short"])
def test_a_reference_that_is_too_short_for_the_rows_is_refused(
    reference: str, dpo: dict[str, Any], base: Path, tokenizer: Tokenizer
) -> None:
    """Without an error a model with learnt positions fails within its embedding, and one with RoPE reads on."""
    short = save_tiny_llama(base / "short", tokenizer, template=None, max_position_embeddings=48)
    fitting = {**dpo["train"], "seq_len": 48}
    if reference == "of_short":  # a run
        run(base, {**dpo, "model": str(short), "steps": 1, "output": reference, "train": fitting})
    train = {key: value for key, value in dpo["train"].items() if key != "seq_len"}
    job = {**dpo, "dpo": {"reference": reference}, "train": train, "steps": 1}
    run(base, job)  # no row is as long as `train.seq_len`, the context of the trained model
    with (base / dpo["data"]).open("a") as file:
        words = " ".join(["sea"] * 60)
        file.write(json.dumps({"prompt": "Say it.", "chosen": words, "rejected": f"{words} sea"}) + "\n")
    with pytest.raises(UserError, match=rf"rows have up to \d+ tokens, and {reference} was built for 48") as error:
        run(base, {**job, "output": "other"})
    assert error.value.problems[0].line
