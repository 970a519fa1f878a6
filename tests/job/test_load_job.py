"""Wrong job files: every problem, at its line and column, with what to write; and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import CannotRun, DiskFailed, Problem, UserError
from stoker.job import load_job
from stoker.job.document.yaml_document import JobDocument, Mark
from stoker.job.keys.key_paths import KeyPath, dotted, leaves, parents_of_keys
from stoker.job.load_job import JobError, check_document

GOOD = "task: sft\nmodel: smollm2-135m\ndata: my.jsonl\n"


def problems_of(folder: Path, text: str, *overrides: str) -> list[Problem]:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_job(path, overrides)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


ONE_WRONG = [
    # text after GOOD (whose lines are 1 to 3), (line, column), part of the message, part of the suggestion
    ("train: {lrr: 1}\n", (4, 9), "unknown key `train.lrr`", "write `lr`"),
    ("lr: 1e-4\n", (4, 1), "unknown key `lr`", "`lr` belongs under `train:`"),
    ("every: 4\n", (4, 1), "unknown key `every`", "under `evaluate:` or under `checkpoint:`"),
    ("learning_rate: 1e-4\n", (4, 1), "unknown key", "write `lr` under `train:`"),
    ("train:\n  learning_rate: 1\n", (5, 3), "unknown key", "write `lr`"),
    ("per_device_train_batch_size: 1\n", (4, 1), "unknown key", "write `micro_batch` under `train:`"),
    ("num_train_epochs: 1\n", (4, 1), "unknown key", "write `epochs`"),
    ("lora_r: 8\n", (4, 1), "unknown key", "write `rank` under `tune:`"),
    ("cutoff-len: 8\n", (4, 1), "unknown key", "write `seq_len` under `train:`"),
    ("train: {steps: 8}\n", (4, 9), "unknown key", "at the top level"),
    ("gradient_checkpointing: true\n", (4, 1), "unknown key", "write `recompute: full` under `parallel:`"),
    ("zzz: 1\n", (4, 1), "unknown key", "the keys here are version, task"),
    ("Train: {}\n", (4, 1), "unknown key", "write `train`"),
    ('train:\n  lr: "1e-4x"\n', (5, 7), "a number above 0 and below 10 or auto, not '1e-4x'", "write 1e-4"),
    ('train:\n  lr: "1e-4"\n', (5, 7), "`train.lr` must be", "write 1e-4 without quotes"),
    ("train:\n  batch: 4o\n", (5, 10), "not '4o'", "write a value such as 8"),
    ("train: {batch: eight}\n", (4, 16), "a whole number above 0 or auto, not 'eight'", "such as 8"),
    ("train: {batch: 0}\n", (4, 16), "above 0 or auto, not 0", ""),
    ("train: {batch: 1e3}\n", (4, 16), "not 1000.0", "write 1000"),
    ("train: {batch: '1,000'}\n", (4, 16), "not '1,000'", "write 1000"),
    ("train: {batch: '1,000,000'}\n", (4, 16), "not '1,000,000'", "write 1000000"),
    ("train: {batch: '0,5'}\n", (4, 16), "not '0,5'", "such as 8"),
    ("train:\n  lr: 0,0005\n", (5, 7), "not '0,0005'", "write 0.0005"),
    ("train:\n  lr: 1,5e-4\n", (5, 7), "not '1,5e-4'", "write 1.5e-4"),
    ("train: {batch: true}\n", (4, 16), "not true", ""),
    ("train: {clip: -1}\n", (4, 15), "of at least 0, not -1", ""),
    ("train: {clip: .inf}\n", (4, 15), "not inf", ""),
    ("train: {compile: yes}\n", (4, 18), "true or false or auto, not 'yes'", "write true"),
    ("train: {precision: bf-16}\n", (4, 20), "one of auto, bf16, fp16, fp32", "write bf16"),
    ("train: {precision: float16}\n", (4, 20), "not 'float16'", "write fp16"),
    ("train:\n  lr:\n", (5, 3), "`train.lr` is empty", "remove the line"),
    ("train: 3\n", (4, 8), "`train` must be a block", "indented below it"),
    ("tune: lorra\n", (4, 7), "`tune.method` must be one of full, lora, qlora, prefix, prompt, p-tuning, not 'lorra'",
     "write lora"),
    ("tune: {method: lora, targets: q_proj}\n", (4, 31), "all-linear or a list of words", "write [q_proj]"),
    ("tune: {method: lora, targets: [q, 3]}\n", (4, 35), "`tune.targets[1]` must be text", '"3"'),
    ("target: {kubernetes: {image: x, cpu: 0}}\n", (4, 38), "above 0 or text, not 0", "such as 32"),
    ("target: {kubernetes: {image: x, cpu: 5x}}\n", (4, 38), "or an amount such as 500m, 1.5 or 64Gi", "32"),
    ("target: {kubernetes: {image: x, gpu: a b}}\n", (4, 38), "a name such as example.com/gpu or none", ""),
    ("target: {kubernetes: {image: x, namespace: A}}\n", (4, 44), "must be a name of lower-case letters", "training"),
    ("target: {kubernetes: {image: x, fluid: {mounts: []}}}\n", (4, 41), "`target.kubernetes.fluid.mounts` is empty",
     "write at least one item"),
    ("target: {ssh: {hosts: [a], environment: {1A: x}}}\n", (4, 42), "`1A` cannot be a name", "another name"),
    ("output: 7\n", (4, 9), "must be text, not 7", 'put it in quotes: "7"'),
    ("version: 2\n", (4, 10), "of version 2", "newer Stoker"),
    ("version: true\n", (4, 10), "must be 1", "write 1"),
    ("evaluate: {data: {split: x}}\n", (4, 12),
     "`path` is missing in `evaluate.data[0]`", "write `path: ...`"),
    ("evaluate: {data: {pth: x}}\n", (4, 19), "unknown key `evaluate.data[0].pth`", "write `path`"),
    ("parallel: {shards: 4}\n", (4, 12), "unknown key `parallel.shards`", ""),
    ("steps: 10\ntrain: {warmup: 10}\n", (5, 17), "never ends within `steps: 10`", "at most 9"),
    ("tune: {rank: 4}\n", (4, 14), "`tune.rank` has no effect in `tune: full`", "write `method: lora`"),
    ("train: {batch: 10, micro_batch: 4}\n", (4, 16),
     "batch 10 is not a multiple of micro_batch 4", "8 or 12"),
    ("module: {model: 'a:b', loss: 'a:b', data: 'a:b'}\n", (4, 1), "no effect in `task: sft`", "remove it"),
    ("evaluate:\n  data: x\n  fraction: 0.1\n", (6, 13), "both set the evaluation data", "keep one"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "place", "message", "suggestion"), ONE_WRONG)
def test_a_problem_is_found_at_its_place(
    tmp_path: Path, text: str, place: tuple[int, int], message: str, suggestion: str
) -> None:
    found = problems_of(tmp_path, GOOD + text)
    at = {(p.line, p.column): p for p in found}
    assert place in at, [str(p) for p in found]
    assert message in at[place].message
    assert suggestion in at[place].suggestion
    assert str(at[place]).startswith(f"{tmp_path / 'job.yaml'}:{place[0]}:{place[1]}: ")


def test_all_problems_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "task: sft\n"
        "model: {name: smollm2-135m, quantise: 3bit}\n"
        "data:\n"
        "  - {path: a.jsonl, weight: 1}\n"
        "  - b.jsonl\n"
        "tune: lora\n"
        "steps: 10\n"
        "epochs: 2\n"
        "train:\n"
        "  lr: '1e-4x'\n"
        "  btach: 8\n"
        "  batch: 10\n"
        "  micro_batch: 4\n"
        "  warmup: 20\n"
    )
    found = problems_of(tmp_path, text, "train.clip=-1", "nonsense")
    places = [(p.line, p.column, p.key) for p in found if p.line]
    assert places == [
        (2, 39, "model.quantise"),
        (5, 5, "data[1]"),
        (7, 8, "steps"),  # against epochs
        (7, 8, "steps"),  # against the warm-up
        (8, 9, "epochs"),
        (10, 7, "train.lr"),
        (11, 3, "train.btach"),
        (12, 10, "train.batch"),
        (13, 16, "train.micro_batch"),
        (14, 11, "train.warmup"),
    ]
    assert "write 4bit" in found[0].suggestion
    assert [p.file for p in found[-2:]] == ["command line", "command line"]
    assert "in `train.clip=-1`: `train.clip` must be" in " ".join(p.message for p in found[-2:])


def test_a_missing_task_stands_at_the_file_and_does_not_hide_the_rest(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "model: x\ntrain: {lr: 99}\n")
    assert [(p.line, p.column, p.key) for p in found] == [(1, 1, "task"), (2, 13, "train.lr")]
    assert "| pretrain | reward | sft | ranking | module`" in found[0].suggestion


def test_a_misspelt_block_is_not_also_called_missing(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "task: sft\nmodle: x\ndata: y\n")
    assert [(p.line, p.message, p.suggestion) for p in found] == [(2, "unknown key `modle`", "write `model`")]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("task: sft\ndata: x\n", ["model"]),
        ("task: sft\nmodel: x\n", ["data"]),
        ("task: module\n", ["module"]),
        ("task: module\nmodel: x\nmodule: {model: 'a:b', loss: 'a.b:c', data: 'a:b'}\n", ["model"]),
        (
            "task: module\ntune: lora\nmodule: {model: 'a:b', loss: 'a.b:c', data: 'a'}\n",
            ["tune", "module.data"],
        ),
        (GOOD + "tune: full\nmix: {temperature: 2}\n", []),
        ("task: sft\nmodel: {name: x, quantise: 8bit}\ndata: y\n", ["model.quantise"]),
        (
            "task: sft\nmodel: {name: x, quantise: 8bit}\ndata: y\ntune: full\n",
            ["model.quantise", "tune.method"],
        ),
        (
            "task: sft\nmodel: {name: x, quantise: 8bit}\ndata: y\ntune: qlora\n",
            ["model.quantise", "tune.method"],
        ),
        ("task: sft\nmodel: {name: x, quantise: 4bit}\ndata: y\ntune: qlora\n", []),
        (
            "task: sft\nmodel: x\ndata: [{path: a, weight: 1}]\nmix: {temperature: 2}\n",
            ["data[0].weight", "mix.temperature"],
        ),
        (
            "task: grpo\nmodel: x\ndata: {path: y, train_on: everything}\ngrpo: {rewards: exact}\n",
            ["data[0].train_on"],
        ),
        (GOOD + "evaluate: {data: x, fraction: 0}\n", []),
        (GOOD + "train: {batch: 32, micro_batch: 4, accumulation: 4}\nparallel: {data: 2}\n", []),
    ],
)
def test_conflicts_stand_at_every_key_that_takes_part(tmp_path: Path, text: str, keys: list[str]) -> None:
    if keys:
        assert [p.key for p in problems_of(tmp_path, text)] == keys
    else:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        assert load_job(path).job.task in ("sft", "module")


def test_overrides_reach_every_kind_of_place(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD + "tune: lora\nsteps: 5\n")
    overrides = [
        "train.lr=1e-3",
        "tune.rank=4",
        "data[0].path=other.jsonl",
        "data[1]=third.jsonl",
        "tune.targets=[q_proj, v_proj]",
        "evaluate.data=held.jsonl",
        "steps=",
        "epochs=2",
        "model.revision='1.0'",
    ]
    loaded = load_job(path, overrides)
    job = loaded.job
    assert job.train.lr == 1e-3
    assert (job.tune.method, job.tune.rank, job.tune.alpha) == ("lora", 4, 8)
    assert [source.path for source in job.data] == ["other.jsonl", "third.jsonl"]
    assert job.tune.targets == ["q_proj", "v_proj"]
    assert [source.path for source in job.evaluate.data] == ["held.jsonl"]
    assert (job.steps, job.epochs) == (None, 2)
    assert job.model is not None and job.model.revision == "1.0"
    assert loaded.origins["tune.rank"].source == "override"
    assert loaded.origins["tune.rank"].where == "tune.rank=4"
    assert loaded.origins["tune.method"].where == f"{path}:4:7"


def test_an_override_of_a_source_needs_an_index_only_among_several(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD + "evaluate: {data: held.jsonl}\n")
    loaded = load_job(path, ["data.too_long=drop", "evaluate.data.max_dropped=0.5"])
    assert loaded.job.data[0].too_long == "drop" and loaded.job.evaluate.data[0].max_dropped == 0.5
    assert loaded.origins["data[0].too_long"].where == "data.too_long=drop"
    with pytest.raises(UserError, match=r"`data` is a list; write `data\[0\].too_long`"):
        load_job(path, ["data[1].path=more.jsonl", "data.too_long=drop"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown key `train.lrr`"),
        ("train.lr=fast", "must be a number"),
        ("lr", "is not an override"),
        ("=3", "is not a key"),
        ("data[7].path=x", "`data` has 1 items"),
        ("evaluate.data.1.path=x", "`evaluate.data` is a list; write `evaluate.data[1].path`"),
        ("data.1.train_on=last", "`data` is a list; write `data[1].train_on`"),
        ("steps.x=1", "`steps` has no keys"),
        ("train.lr=[1", "not closed"),
        ("tune=lorra", "`tune.method` must be one of"),
    ],
)
def test_wrong_overrides_are_located_on_the_command_line(tmp_path: Path, override: str, message: str) -> None:
    (problem,) = problems_of(tmp_path, GOOD + "steps: 5\n", override)
    assert (problem.file, problem.line) == ("command line", 0)
    assert problem.message.startswith(f"in `{override}`: ")
    assert message in str(problem)


def test_other_rooms_can_point_at_a_key(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD + "train:\n  lr: 1e-4\n")
    loaded = load_job(path, ["tune=lora"])
    places = {
        key: (p.file, p.line, p.column)
        for key in (
            "train.lr",
            "train.batch",
            "data[0].path",
            "data[0].weight",
            "checkpoint.every",
            "tune.method",
        )
        if (p := loaded.problem(key, "no good"))
    }
    file = str(path)
    assert places == {
        "train.lr": (file, 5, 7),
        "train.batch": (file, 4, 1),
        "data[0].path": (file, 3, 7),
        "data[0].weight": (file, 3, 1),
        "checkpoint.every": (file, 1, 1),
        "tune.method": ("command line", 0, 0),
    }


KEYS = st.sampled_from([*parents_of_keys(), "lrr", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(width=16)
    | st.sampled_from(["sft", "lora", "auto", "x:y", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_mapping_is_a_job_or_a_list_of_problems(data: dict[str, object]) -> None:
    marks: dict[KeyPath, Mark] = {}
    document = JobDocument("job.yaml", data, marks)

    def mark(value: object, path: KeyPath) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            marks[(*path, key)] = Mark("job.yaml", (1, 1), (1, 2))
            mark(inner, (*path, key))

    mark(data, ())
    try:
        loaded = check_document(document)
    except UserError as error:
        assert error.problems
        assert all(problem.message and problem.key for problem in error.problems)
    else:
        assert {dotted(path) for path, _ in leaves(loaded.job)} == set(loaded.origins)


def test_errors_of_what_a_key_names_are_placed_at_the_key(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{GOOD}train: {{lr: 1e-4}}\n")
    loaded = load_job(tmp_path / "job.yaml")
    elsewhere = Problem("has no column `x`", "write `y`", file="rows.jsonl", line=3, column=1)
    with pytest.raises(DiskFailed) as caught, loaded.errors_at("train.lr"):
        raise DiskFailed(elsewhere, Problem("unreadable", key="data"))
    first, second = caught.value.problems
    assert (first.line, first.column, first.key) == (4, 13, "train.lr")
    assert (first.message, first.suggestion) == ("rows.jsonl:3:1: has no column `x`", "write `y`")
    assert (second.message, second.line, second.key) == ("unreadable", 4, "train.lr")
    with pytest.raises(UserError) as whole, loaded.errors_at_their_keys():
        raise JobError(elsewhere, Problem("unreadable", key="data"), "no place", sound=loaded)
    assert [problem.line for problem in whole.value.problems] == [3, 3, 0]
    with pytest.raises(CannotRun, match="too large"), loaded.errors_at("data"):
        raise CannotRun("too large")


@pytest.mark.parametrize(
    "override", ["faults={nodes: {min: 2, max: 2}}", "train.warmup=9", "parallel.devices=[0, 1]", "train.seq_len=8"]
)
def test_values_at_a_limit_are_allowed(tmp_path: Path, override: str) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    load_job(tmp_path / "job.yaml", ["steps=10", "epochs=", override])
