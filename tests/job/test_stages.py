"""A file with stages: what each stage has, which earlier ones it names, and errors at their places."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from stoker.cli.main import main
from stoker.errors import UserError
from stoker.job.document.yaml_document import parse_document
from stoker.job.keys.editor_schema import editor_schema
from stoker.job.load_job import load_job
from stoker.job.stage import Stage, weights_folder
from stoker.job.stages import StagedJob, read_stages

CHAIN = """\
model: {name: llama-3m, stop: <|endoftext|>}
tune: {method: lora, rank: 4}
data: my.jsonl
epochs: 1
train: {seq_len: 64, lr: 1e-3}
checkpoint: {to: saved}
grpo: {rewards: numeric, answers: 4, max_tokens: 16}
stages:
  - name: sft
    task: sft
  - name: more
    task: sft
    model: {from: sft}
    steps: 5
    tune: full
    train: {lr: 1e-4}
  - name: align
    task: grpo
    model: {from: more}
    output: elsewhere
    checkpoint: {to: here, keep: 3}
    grpo: {prompts: 4}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    Path("chain.yaml").write_text(CHAIN)
    return tmp_path


def staged(text: str = CHAIN, *overrides: str) -> StagedJob:
    Path("chain.yaml").write_text(text)
    return read_stages("chain.yaml", overrides)


def errors(text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as raised:
        staged(text, *overrides)
    return [str(problem) for problem in raised.value.problems]


def test_a_stage_has_the_shared_keys_and_its_own() -> None:
    sft, more, align = (stage.load().job for stage in staged().stages)
    assert (sft.epochs, sft.steps, more.epochs, more.steps) == (1, None, None, 5)  # its steps replace the epochs
    assert (sft.train.lr, more.train.lr, more.train.seq_len) == (1e-3, 1e-4, 64)  # blocks are merged
    assert (sft.tune.rank, more.tune.method, align.tune.rank) == (4, "full", 4)  # another method is another block
    assert align.grpo.answers == 4 and align.grpo.prompts == 4  # type: ignore[attr-defined]
    assert sft.grpo is None  # type: ignore[attr-defined]


def test_each_stage_has_a_folder_of_its_own() -> None:
    jobs = [stage.load().job for stage in staged().stages]
    assert [job.output for job in jobs] == ["runs/chain/sft", "runs/chain/more", "elsewhere"]
    assert [job.checkpoint.to for job in jobs] == ["saved/sft", "saved/more", "here"]
    assert staged(CHAIN, "output=x").stages[0].output == "x/sft"
    for text in ("stages.align.output=", "stages.align.output=null"):  # as if it was not written
        align = staged(CHAIN, text).stages[2]
        assert (align.output, align.load().job.output) == ("runs/chain/align",) * 2


def test_a_stage_begins_with_the_weights_of_an_earlier_one() -> None:
    sft, more, align = staged().stages
    assert (sft.needs, more.needs, align.needs) == ({}, {"model.from": "sft"}, {"model.from": "more"})
    before, after = align.load().job.model, align.load({"more": "0123456789abcdef"})
    assert before is not None and (before.name, before.stop) == ("llama-3m", "<|endoftext|>")
    assert after.job.model is not None and after.job.model.name == "runs/chain/more.merged-0123456789ab"
    assert after.origins["model.name"].where == "chain.yaml:19:19"


@pytest.mark.parametrize("trusted", [False, True])
def test_a_stage_trusts_code_only_as_the_stage_before(trusted: bool) -> None:
    given = "name: llama-3m, trust_remote_code: true" if trusted else "name: llama-3m"
    more = staged(CHAIN.replace("name: llama-3m", given)).stages[1]
    model = more.load({"sft": "0" * 64}).job.model
    assert model is not None and (model.trust_remote_code, model.allow_pickle) == (trusted, False)


def test_a_stage_has_the_defaults_that_it_is_trained_with() -> None:
    """A catalogue size that an earlier stage has trained is no model from random weights."""
    text = "task: pretrain\nmodel: llama-3m\ndata: my.jsonl\nsteps: 5\n"
    text += "stages:\n  - {name: one}\n  - {name: two, model: {from: one}}\n"
    one, two = staged(text).stages
    shown, trained = two.load().job, two.load({"one": "0" * 64}).job
    assert shown.model is not None and shown.model.name == "llama-3m"
    assert shown.train == trained.train != one.load().job.train


def test_overrides_change_shared_keys_or_those_of_a_stage() -> None:
    sft, more, _ = staged(CHAIN, "train.lr=2e-3", "stages.more.steps=9", "stages[0].tune=full").stages
    assert (sft.load().job.train.lr, more.load().job.train.lr) == (2e-3, 1e-4)
    assert (more.load().job.steps, sft.load().job.tune.method) == (9, "full")
    assert more.load().origins["steps"].where == "stages.more.steps=9"


@pytest.mark.parametrize(
    ("was", "now", "error"),
    [
        ("{from: more}", "{from: mor}", "chain.yaml:19:19: stage align: `model.from: mor`: there is no such stage; "
         "write more"),
        ("{from: sft}", "{from: align}", "chain.yaml:13:19: stage more: `model.from: align`: this is not an earlier "
         "stage; move that stage before this one"),
        ("{from: sft}", "{from: 3}", "chain.yaml:13:19: stage more: `model.from: 3`: there is no such stage; "
         "take one of sft"),
        ("name: more", "name: sft", "chain.yaml:11:11: two stages are named sft; give each its own name"),
        ("name: more", "name: a/b", "chain.yaml:11:11: 'a/b' is not a name of a stage; write letters, digits, - and _, "
         "beginning with a letter or digit; a number in quotes"),
        ("name: more", "name: [more]", "chain.yaml:11:5: ['more'] is not a name of a stage; write letters, digits, - "
         "and _, beginning with a letter or digit; a number in quotes"),
        ("name: more", "seed: 3", "chain.yaml:11:5: `stages[1]` has no `name`; write `name: sft`"),
        ("task: grpo", "task: sft", "chain.yaml:7:1: `grpo` has no effect: no stage is of this task; remove it"),
        ("tune: full", "tune: prompt", "chain.yaml:19:19: stage align: `model.from: more`: it trains virtual tokens, "
         "which cannot be added to the weights; write `tune: lora` or `tune: full` in that stage"),
        ("tune: full", "tune: qlora", "chain.yaml:19:19: stage align: `model.from: more`: it trains an adapter of a "
         "quantised base, which cannot be added to the weights; write `tune: lora` or `tune: full` in that stage"),
        ("model: {from: sft}\n    steps: 5\n    tune: full",
         "model: {from: sft, quantise: int8}\n    steps: 5\n    tune: {method: lora, rank: 4}",
         "chain.yaml:19:19: stage align: `model.from: more`: it trains an adapter of a quantised base, which cannot be "
         "added to the weights; remove `model.quantise` in that stage"),
    ],
)  # fmt: skip
def test_errors_have_a_place(was: str, now: str, error: str) -> None:
    assert was in CHAIN
    assert error in errors(CHAIN.replace(was, now, 1))


def test_steps_of_a_stage_are_removed_as_the_error_says() -> None:
    both = CHAIN.replace("steps: 5", "steps: 5\n    epochs: 2")
    with pytest.raises(UserError, match=r"`steps=` or `stages.NAME.steps=` removes it"):
        staged(both).stages[1].load()
    assert staged(both, "stages.more.steps=").stages[1].load().job.epochs == 2


CRITIC = """\
model: llama-3m
tune: {method: lora, rank: 4}
data: my.jsonl
steps: 5
stages:
  - {name: one, task: reward}
  - {name: two, task: ppo, ppo: {reward: one, critic: one}}
"""


def test_a_critic_of_its_own_has_no_quantised_base() -> None:
    staged(CRITIC).stages[1].load()
    staged(CRITIC.replace("method: lora, rank: 4", "method: full")).stages[1].load()
    own = "- {name: one, task: reward, tune: qlora}"
    error = (
        "chain.yaml:7:55: stage two: `ppo.critic: one`: it trains an adapter of a quantised base, which cannot be a "
    )
    error += "critic of its own; write `tune: lora` or `tune: full` in that stage"
    assert errors(CRITIC.replace("- {name: one, task: reward}", own)) == [error]


@pytest.mark.parametrize("stages", ["", "3", "[]", "{name: sft}"])
def test_stages_are_a_list(stages: str) -> None:
    (error,) = errors(f"task: sft\nstages: {stages}\n")
    assert error.startswith("chain.yaml:2:1: `stages` must be a list of jobs; write one `- name: ...`")


def test_overrides_that_nothing_takes_are_errors() -> None:
    (error,) = errors(CHAIN, "stages.mor.steps=3")
    assert error == "command line: in `stages.mor.steps=3`: there is no stage mor; write more"
    assert staged(CHAIN, "stages[2].seed=3").stages[2].load().job.seed == 3
    (error,) = errors(CHAIN, "stages[3].seed=3")
    assert error.startswith("command line: in `stages[3].seed=3`: there is no stage [3]")
    (error,) = errors(
        CHAIN.replace("epochs: 1\n", "")
        .replace("task: sft\n  -", "task: sft\n    seed: 1\n  -")
        .replace("steps: 5", "seed: 2")
        .replace("output: else", "seed: 3\n    output: else"),
        "seed=4",
    )
    assert error == "command line: in `seed=4`: every stage has its own `seed`; write stages.sft.seed=4"
    named = "task: sft\nmodel: llama-3m\ndata: my.jsonl\nstages: [{name: one, output: a}, {name: two, output: b}]\n"
    assert staged(named, "output=c").root == "c"  # holds the record of the stages


def test_check_names_stages_and_reports_what_is_shared_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chain.yaml").write_text(
        CHAIN.replace("seq_len: 64", "seq_len: 64, warmupp: 1").replace("steps: 5", "stps: 5")
    )
    assert main(["check", "chain.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: chain.yaml:5:22: stage sft: unknown key `train.warmupp`; write `warmup`",
        "error: chain.yaml:14:5: stage more: unknown key `stps`; write `steps`",
    ]


def test_check_prints_every_stage_and_one_as_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "chain.yaml"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# stage")]
    assert heads == [
        "# stage 1 of 3, sft",
        "# stage 2 of 3, more; model.from: sft",
        "# stage 3 of 3, align; model.from: more",
    ]
    assert main(["check", "chain.yaml", "--only", "more"]) == 0
    Path("more.yaml").write_text(capsys.readouterr().out)
    assert load_job("more.yaml").job == staged().stages[1].load().job


def test_plan_has_a_row_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "chain.yaml", "--on", "1xH100", "--from", "more", "stages.align.steps=7"]) == 0
    table, note = capsys.readouterr().out.split("\n\n")
    lines = [line.split() for line in table.splitlines()]
    assert [line[0] for line in lines] == ["stage", "more", "align", "total"] and "share of sampling" in note
    assert lines[2][1:7] == ["grpo", "policy", "(lora),", "reference", "(its", "base)"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["plan", "chain.yaml", "--only", "mor"], "--only mor: there is no such stage; write more"),
        (["train", "chain.yaml", "--from", "aling"], "--from aling: there is no such stage; write align"),
        (["train", "chain.yaml", "--only", "sft", "--from", "sft"],
         "--only and --from both select stages; keep one of them"),
        (["train", "chain.yaml", "--only", "more"], "stage more needs stage sft (`model.from`), which is not done; "
         "train it first: --only sft, or leave the option out"),
        (["check", "one.yaml", "--only", "sft"], "one.yaml: --only sft: this job has no stages; leave --only out"),
        (["data", "chain.yaml"], "chain.yaml:8:1: each stage of this file has its own data; write `--only STAGE`: "
         "one of sft, more, align"),
        (["data", "chain.yaml", "--only", "sft", "--samples", "-1"],
         "--samples must be at least 0; write how many sequences to show"),
        (["verify", "chain.yaml"], "chain.yaml:8:1: this file has stages, and one job is wanted; `stoker check`, "
         "`data`, `plan` and `train` take it; `stoker check FILE --only STAGE` prints a stage as a job"),
    ],
)  # fmt: skip
def test_wrong_stages_exit_with_2(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.yaml").write_text("task: sft\nmodel: llama-3m\ndata: my.jsonl\n")
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {error}\n"
    assert not Path("runs").exists()


def test_fix_leaves_the_stages_alone() -> None:
    assert main(["check", "chain.yaml", "--fix"]) == 0
    assert Path("chain.yaml").read_text().endswith(CHAIN)


@pytest.mark.parametrize(
    ("was", "now", "fits"),
    [
        ("", "", True),
        ("name: more", "nam: more", False),
        ("{from: sft}", "{form: sft}", False),
        ("steps: 5", "steps: five", False),
        ("stages:", "stage:", False),
    ],
)
def test_the_editors_schema_knows_stages(was: str, now: str, fits: bool) -> None:
    text = CHAIN.replace("{prompts: 4}", "{rewards: numeric}")
    job = parse_document(text.replace(was, now, 1), "chain.yaml").data
    assert Draft202012Validator(editor_schema()).is_valid(job) is fits


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CHAIN.replace("stages:", "stagse:"), "chain.yaml:8:1: unknown key `stagse`; write `stages`"),
        (
            "task: sft\nmodel: {from: sft}\ndata: my.jsonl\n",
            "chain.yaml:2:9: unknown key `model.from`; write `name`; `from` names an earlier stage, in a file with "
            "`stages`",
        ),
    ],
)
def test_a_file_without_stages_says_what_was_meant(text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("chain.yaml").write_text(text)
    assert main(["check", "chain.yaml"]) == 2
    assert f"error: {error}" in capsys.readouterr().err.splitlines()


def test_weights_of_a_stage_that_an_earlier_version_wrote_into_its_run_are_used(folder: Path) -> None:
    more, digest = staged().stages[1], "0123456789abcdef"
    assert _model_after(more, digest) == "runs/chain/sft.merged-0123456789ab"
    former = folder / "runs/chain/sft/merged-0123456789ab"
    former.mkdir(parents=True)
    assert _model_after(more, digest) == "runs/chain/sft/merged-0123456789ab"
    assert folder / weights_folder("runs/chain/sft", digest, folder) == former


def _model_after(stage: Stage, digest: str) -> str:
    model = stage.load(trained={"sft": digest}).job.model
    assert model is not None
    return model.name


def test_the_chain_of_the_documentation_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "stages.md").read_text(encoding="utf-8")
    Path("chain.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    Path("answers.jsonl").write_text('{"prompt": "1 + 1?", "response": "2"}\n')
    Path("questions.jsonl").write_text('{"prompt": "1 + 1?", "expected": 2}\n')
    assert main(["check", "chain.yaml"]) == 0
