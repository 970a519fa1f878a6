"""Tasks of lm-evaluation-harness: our engine against its own class for Hugging Face models, and the offline pack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from evaluation_rows import write_lines

from stoker.cli.main import main
from stoker.evaluate.ask_model import AskSettings
from stoker.evaluate.harness import _figures, load_tasks, run_tasks, task_specs
from stoker.evaluate.harness_model import HarnessModel
from stoker.evaluate.offline_tasks import (
    arithmetic_rows,
    human_eval_rows,
    mmlu_rows,
    run_human_eval,
    speech_rows,
)
from stoker.generate.open_model import open_model

pytestmark = pytest.mark.slow  # the harness alone takes seconds to import
TEXTS = [
    "The sea is blue and the wind is cold.",
    "How are you today? I am well, thank you. " * 12,  # longer than the model's context
    "x",
]
PAIRS = [
    ("What is the capital of France?", " Paris"),
    ("The sea is ", "blue."),
    ("", "The wind is cold."),
    ("The wind is cold. " * 30, " The sea is blue."),
]


class Asked:
    """A request of the harness."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    """As the harness computes; a processor with matrix units for bfloat16 would use them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker.hardware.process_device.has_bf16_matrix_units", lambda: False)
        yield


@pytest.fixture(scope="module")
def ours(base: Path) -> HarnessModel:
    return HarnessModel(open_model("tiny", base), AskSettings())


@pytest.fixture(scope="module")
def theirs(base: Path, ours: HarnessModel) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(base / "tiny"), device="cpu", dtype="float32", batch_size=1)


def test_log_likelihoods_are_the_harness_own(ours: HarnessModel, theirs: Any) -> None:
    asked = [Asked(*pair) for pair in PAIRS]
    mine, its = ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True)
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in its], abs=1e-5)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in its]


def test_greedy_continuations_are_said_to_be(ours: HarnessModel, theirs: Any) -> None:
    context = "What is the capital of France?"
    (after,) = ours.generate_until([Asked(context, {"until": [], "max_gen_toks": 1})])
    if after and ours.tok_encode(context + after)[:-1] == ours.tok_encode(context):
        ((_, greedy),) = ours.loglikelihood([Asked(context, after)])
        assert greedy and theirs.loglikelihood([Asked(context, after)], disable_tqdm=True)[0][1]


def test_rolling_log_likelihoods_are_the_harness_own(ours: HarnessModel, theirs: Any) -> None:
    asked = [Asked(text) for text in TEXTS]
    mine, its = ours.loglikelihood_rolling(asked), theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    assert mine == pytest.approx(its, abs=1e-4, rel=1e-6)


def test_answers_are_the_harness_own(ours: HarnessModel, theirs: Any) -> None:
    options = {"until": [" the"], "max_gen_toks": 12, "do_sample": False}
    contexts = [context for context, _ in PAIRS if context]
    answers = []
    for more in ({}, {"repetition_penalty": 1.5, "num_beams": 1}):
        asked = [Asked(context, options | more) for context in contexts]
        answers.append(ours.generate_until(asked))
        assert answers[-1] == theirs.generate_until(asked, disable_tqdm=True)
    assert answers[0] != answers[1]


@pytest.mark.parametrize("option", ["typical_p", "num_beams"])
def test_an_option_that_the_engine_lacks_is_refused(option: str, ours: HarnessModel) -> None:
    from stoker.errors import UserError

    with pytest.raises(UserError, match=option):
        ours.generate_until([Asked("x", {"until": [], option: 2})])


def local_task(folder: Path) -> Path:
    write_lines(folder / "questions.jsonl", [{"q": f"How are you? {i}", "a": "I am well"} for i in range(6)])
    (folder / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {folder}/questions.jsonl}}\n"
        "test_split: train\noutput_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: acc}, {metric: perplexity}]\n"
    )
    return folder / "mine.yaml"


@pytest.mark.exhaustive
def test_a_yaml_task_gives_the_figures_of_the_harness_own_class(
    base: Path, ours: HarnessModel, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.evaluator import simple_evaluate

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = local_task(tmp_path)
    specs, _ = task_specs([str(path)], base)
    found = {
        f.name: f for f in run_tasks(open_model("tiny", base), specs, AskSettings(), manager=load_tasks(specs)).figures
    }
    expected = simple_evaluate(theirs, tasks=[str(path)], bootstrap_iters=1000)["results"]["mine"]
    assert found["perplexity"].value == pytest.approx(expected["perplexity,none"], rel=1e-5)
    assert found["acc"].value == expected["acc,none"]
    assert found["acc"].standard_error == pytest.approx(expected["acc_stderr,none"])
    assert found["acc"].rows == 6


def test_the_command_keeps_what_tasks_gave(here: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "bad", "--tasks", "offline/arithmetic", "offline/sotu", "--limit", "3", "--to", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    out, err = capfd.readouterr()
    assert "git" not in err  # which the harness asks about the current folder
    found = json.loads(out)
    figures = {figure["of"]: figure for figure in found["figures"]}
    assert set(figures) == {"offline/arithmetic", "offline/sotu"}
    assert all(figure["rows"] == 3 and figure["standard_error"] is not None for figure in figures.values())
    rows = [json.loads(line) for line in Path(found["kept"]).with_suffix(".jsonl").read_text().splitlines()]
    totals = [row["metrics"]["bits_per_byte"] for row in rows if row["task"] == "offline/sotu"]
    import math

    nats, size = (sum(column) for column in zip(*totals, strict=True))
    assert figures["offline/sotu"]["value"] == pytest.approx(-nats / size / math.log(2))


def test_the_figures_of_a_filter_are_of_its_own_samples() -> None:
    sums = [(-3.0, 4), (-2.0, 5), (-9.0, 6)]
    samples = [{"filter": name, "bits_per_byte": pair} for name in ("strict", "flexible") for pair in sums]
    results = {"bits_per_byte,strict": 1.0, "bits_per_byte,flexible": 1.0}
    alone = _figures("t", {"bits_per_byte,strict": 1.0}, samples[:3])[0]
    for figure in _figures("t", results, samples):
        assert figure.rows == 3 and figure.standard_error == alone.standard_error


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["offline/nothing"], "take one of offline/mmlu-dev"),
        (["no_such_task_at_all"], "has no task 'no_such_task_at_all'"),
        (["none.yaml"], "there is no file none.yaml"),
        (["humaneval"], ""),
    ],
)
def test_tasks_that_cannot_be_are_one_clear_error(
    tasks: list[str], message: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    assert main(["eval", "bad", "--tasks", *tasks]) == 2
    assert message in capsys.readouterr().err


def test_the_pack_is_what_packages_ship() -> None:
    questions = mmlu_rows()
    assert len(questions) > 250 and len({row["subject"] for row in questions}) == 57
    assert all(len(row["options"]) == 4 and all(row["options"]) for row in questions)
    assert len(human_eval_rows()) == 164
    assert len(speech_rows()) == 40
    sums = arithmetic_rows()
    assert len(sums) == 600 and sums == arithmetic_rows()
    for row in sums:
        assert str(eval(row["question"].rstrip(" ="))) == row["answer"]


def test_every_solution_of_human_eval_passes_in_the_sandbox_and_none_at_all_fails() -> None:
    for doc in human_eval_rows()[:164:4]:
        assert run_human_eval(doc, [doc["canonical_solution"]]) == {"pass@1": 1.0}, doc["task_id"]
        assert run_human_eval(doc, ["    return None\n"]) == {"pass@1": 0.0}, doc["task_id"]
