"""Every compression gives the same rows; broken rows of CSV, text and Parquet are refused with their place."""

from __future__ import annotations

import csv
import gzip
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from row_outcomes import json_lines, outcome

from stoker.data.files import byte_streams, readers, tables
from stoker.data.files.readers import data_suffix, read_rows
from stoker.data.files.rows import Raw, Rejected
from stoker.errors import UserError

ROWS = [{"instruction": f"Say {i} in “words”", "output": f"It is\n{i}, über {i - 1}"} for i in range(700)]


def write_csv(path: Path, separator: str = ",") -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["instruction", "output"], delimiter=separator)
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=300)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(json_lines(ROWS)),
    "crlf.ndjson": lambda path: path.write_bytes(json_lines(ROWS).replace(b"\n", b"\r\n")),
    "lines.json": lambda path: path.write_bytes(json_lines(ROWS)),
    "array.json": lambda path: path.write_text(json.dumps(ROWS), encoding="utf-8"),
    "pretty.json": lambda path: path.write_text("\ufeff\n" + json.dumps(ROWS, indent=2), encoding="utf-8"),
    "nested.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS}), encoding="utf-8"),
    "comma.csv": write_csv,
    "semicolon.csv": lambda path: write_csv(path, ";"),
    "bar.csv": lambda path: write_csv(path, "|"),
    "tab.tsv": lambda path: write_csv(path, "\t"),
    "table.parquet": write_parquet,
}


def compress(path: Path, archive: str) -> Path:
    import zstandard

    data = path.read_bytes()
    packed = path.with_name(path.name + archive)
    half = len(data) // 2
    one = gzip.compress if archive == ".gz" else zstandard.compress
    packed.write_bytes(one(data[:half]) + one(data[half:]))  # two members, as parallel compressors write
    return packed


@pytest.mark.parametrize("archive", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_packing_gives_the_rows_of_the_json_lines(tmp_path: Path, name: str, archive: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    if archive:
        path = compress(path, archive)
    assert [value for _, value in outcome(path)] == ROWS
    for start in (1, 299, 300, 650, 700, 900):
        assert outcome(path, start) == outcome(path)[start:]


def test_broken_csv_rows_are_refused_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_bytes(
        b"question,answer\r\n"  # 1
        b"one,two\r\n"  # 2
        b'"over\r\ntwo lines",yes\r\n'  # 3 and 4
        b"too,many,cells\r\n"  # 5
        b"too few\r\n"  # 6
        b"\r\n"  # 7: blank, no row
        b"empty,\r\n"  # 8
        b"missing,NaN\r\n"  # 9
        b"byte,\xff\r\n"  # 10
        b'"quote" astray,x\r\n'  # 11
        b"nul,\0\r\n"  # 12
        b"fine,again\r\n"  # 13
        b'never,"closed\r\n'  # 14
        b"lost,in it\r\n"
    )
    found = outcome(path)
    assert [row for row, _ in found] == [2, 3, 5, 6, 8, 9, 10, 11, 12, 13, 14]
    by_row = dict(found)
    assert by_row[3] == {"question": "over\r\ntwo lines", "answer": "yes"}
    assert by_row[5] == "wrong number of cells: 3, the header has 2"
    assert by_row[6] == "wrong number of cells: 1, the header has 2"
    assert by_row[8] == {"question": "empty", "answer": ""}
    assert isinstance(by_row[9], dict) and by_row[9]["answer"] != by_row[9]["answer"]
    assert by_row[10] == "not valid UTF-8"
    assert str(by_row[11]).startswith("not valid CSV:")
    assert by_row[12] == "NUL byte in text"
    assert by_row[13] == {"question": "fine", "answer": "again"}
    assert by_row[14] == "not valid CSV: a quote opened here is never closed, 1 more lines are lost in it"


def test_lines_of_csv_that_end_in_cr_alone_are_named(tmp_path: Path) -> None:
    path = tmp_path / "cr.csv"
    path.write_bytes(b"a,b\r1,2\r3,4\r")
    with pytest.raises(UserError, match="its lines end in CR alone; convert them to LF"):
        outcome(path)


def test_a_csv_cell_of_three_megabytes_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    path.write_text("text,n\n" + "x" * 3_000_000 + ",1\n")
    assert outcome(path) == [(2, {"text": "x" * 3_000_000, "n": "1"})]


@pytest.mark.parametrize("archive", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "comma.csv"])
def test_a_truncated_archive_gives_the_rows_before_the_damage(tmp_path: Path, name: str, archive: str) -> None:
    random.seed(0)
    noise = [{"instruction": f"{random.getrandbits(120):030x}", "output": "x"} for _ in range(20_000)]
    path = tmp_path / name
    if name.endswith(".csv"):
        path.write_text("instruction,output\n" + "".join(f"{r['instruction']},x\n" for r in noise))
    else:
        path.write_bytes(json_lines(noise))
    whole = gzip.compress(path.read_bytes())
    if archive == ".zst":
        import zstandard

        whole = zstandard.compress(path.read_bytes())
    packed = tmp_path / (name + archive)
    packed.write_bytes(whole[: len(whole) * 2 // 3])
    *rows, last = outcome(packed)
    assert 5000 < len(rows) < 15_000
    assert [value for _, value in rows] == noise[: len(rows)]
    assert last[0] == rows[-1][0] + 1 and str(last[1]).startswith("damaged archive: ")


def test_text_is_one_document_a_file(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_bytes(b"\xef\xbb\xbfOne line.\r\n\r\nAnother.\n")
    assert outcome(path) == [(1, "One line.\r\n\r\nAnother.\n")]
    (tmp_path / "empty.md").write_text("\n \n")
    assert outcome(tmp_path / "empty.md") == []
    (tmp_path / "bytes.txt").write_bytes(b"fine\n\xe9t\xe9\n")
    assert outcome(tmp_path / "bytes.txt") == [(1, "not valid UTF-8: 0xe9 at byte 6")]
    (tmp_path / "nul.txt").write_bytes(b"PK\0\0")
    assert outcome(tmp_path / "nul.txt") == [(1, "NUL byte in text")]


@pytest.mark.parametrize("between", ["\n\n", "\n"])
def test_a_large_text_comes_in_parts_that_lose_nothing(tmp_path: Path, between: str) -> None:
    path = tmp_path / "book.txt"
    text = between.join(f"paragraph {i} " + "word " * 30 for i in range(10_000))
    path.write_text(text)
    parts = outcome(path)
    assert "".join(str(value) for _, value in parts) == text
    assert all(len(str(value)) <= 4 * readers.PART + 200 for _, value in parts)
    lines = text.splitlines()
    for row, value in parts:
        assert str(value).startswith(lines[row - 1])
    if between == "\n\n":
        assert all(str(value).endswith("\n\n") for _, value in parts[:-1]) and len(parts) > 20


def test_single_empty_lines_do_not_copy_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gaps.csv"
    path.write_bytes(b'a\n"' + b"x\n\n" * 1000)
    monkeypatch.setattr(byte_streams, "_EMPTY_LINES", None)  # what a copy is searched for
    with byte_streams.ByteStream(path) as stream:
        assert len(list(stream.lines())) == 2001


def test_a_small_archive_is_unpacked_in_small_blocks(tmp_path: Path) -> None:
    import zstandard

    path = tmp_path / "bomb.json.zst"
    with zstandard.open(path, "wb") as file:
        file.write(b"[")
        for _ in range(200):
            file.write(b"[]," * 2**19)
    assert path.stat().st_size < 2**16
    assert max(map(len, byte_streams._zstandard_blocks(path))) <= 2**25
    with pytest.raises(UserError, match="larger than 64 MiB"):
        list(read_rows(path, most=2**26))


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_empty_lines_are_counted_in_runs(tmp_path: Path, end: bytes) -> None:
    """A line's number counts them; reading them takes few steps, however many they are."""
    empty = end * 1_000_000
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b'{"a": 1}' + end + empty + b'{"a": 2}' + end + end + b'{"a": 3}')
    assert outcome(path) == [(1, {"a": 1}), (1_000_002, {"a": 2}), (1_000_004, {"a": 3})]
    with byte_streams.ByteStream(path) as stream:
        assert len(list(stream.lines())) < 100
    path = tmp_path / "gaps.csv"
    path.write_bytes(b"a" + end + b"1" + end + empty + b'"x' + end + end + end + b'y"' + end + end + b'"2')
    assert outcome(path) == [
        (2, {"a": "1"}),
        (1_000_003, {"a": f"x{end.decode() * 3}y"}),
        (1_000_008, "not valid CSV: a quote opened here is never closed, 0 more lines are lost in it"),
    ]
    path = tmp_path / "gaps.txt"
    path.write_bytes(empty + b"one" + end + 300 * b"word " + end + empty + b"two")
    parts = outcome(path)
    assert [row for row, _ in parts] == [1_000_001, 2_000_003]
    assert str(parts[0][1]).startswith("one")


def test_a_header_of_very_many_columns_takes_no_longer_than_reading_it(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(200_000)]
    path = tmp_path / "wide.csv"
    path.write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    began = time.process_time()
    assert outcome(path) == [(2, dict.fromkeys(names, "1"))]
    assert time.process_time() - began < 10  # comparing each with each takes minutes


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.parquet.gz"])
def test_a_file_that_is_read_whole_has_a_bound(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = b"[" + b" " * (3 << 20) + b"]"
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    if ".json" in name:
        assert list(read_rows(path, most=len(data))) == []
    with pytest.raises(UserError, match="larger than 2 MiB: too large to be read whole"):
        list(read_rows(path, most=2 << 20))
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'{"a": 1}\n' * (1 << 18))
    assert sum(1 for _ in read_rows(lines, most=2 << 20)) == 1 << 18


WHOLE_FILES: list[tuple[str, bytes, str]] = [
    ("utf16.jsonl", '{"a": 1}'.encode("utf-16"), "UTF-16, .* iconv -f UTF-16 -t UTF-8 utf16.jsonl > new.jsonl"),
    ("cut.json", b'[{"a": "cut sho', "not valid JSON: Unterminated string;"),
    ("fake.jsonl.gz", b'{"a": 1}\n', "not a .gz archive"),
    ("fake.csv.zst", b"a,b\n", "not a .zst archive"),
    ("fake.parquet", b"a,b\n" * 10, "not a Parquet file"),
    ("latin.json", b'[{"a": "\xe9"}]', "not valid UTF-8"),
    ("twice.csv", b"a,a\n1,2\n", "column 'a' occurs twice"),
    ("what.xlsx", b"PK", "unknown kind of file"),
]


@pytest.mark.parametrize(("name", "data", "message"), WHOLE_FILES, ids=[name for name, _, _ in WHOLE_FILES])
def test_what_is_wrong_with_a_whole_file_is_one_error(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        outcome(path)


def test_a_missing_file_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        outcome(tmp_path / "gone.jsonl")


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.json", "empty.csv", "empty.txt"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert outcome(tmp_path / name) == []


def test_repeated_values_of_parquet_are_in_memory_once(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    indices = pa.array([0] * 400, pa.int32())
    value = "a" * 2**20
    texts = pa.DictionaryArray.from_arrays(indices, pa.array([value]))
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    rows = read_rows(tmp_path / "texts.parquet")
    assert sum(isinstance(row, Raw) and row.value == {"text": value} for row in rows) == 400
    assert tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before < 64 * 2**20
    tracemalloc.stop()


def test_a_parquet_row_over_the_longest_line_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lists = pa.ListArray.from_arrays(pa.array([0, 70, 72], pa.int32()), pa.array(["a" * 2**20] * 72))
    pq.write_table(pa.table({"texts": lists}), tmp_path / "lists.parquet")
    first, second = read_rows(tmp_path / "lists.parquet")
    assert first == Rejected(str(tmp_path / "lists.parquet"), 1, "longer than 64 MiB")
    assert isinstance(second, Raw) and len(second.value["texts"]) == 2


def test_parquet_text_that_is_no_utf8_costs_only_its_row(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = pa.array([b"fine", b"\xff\xfe", None, b"too"], pa.binary())
    path = tmp_path / "bytes.parquet"
    pq.write_table(pa.table({"text": raw.view(pa.string())}), path)
    assert outcome(path) == [
        (1, {"text": "fine"}),
        (2, "not valid UTF-8"),
        (3, {"text": None}),
        (4, {"text": "too"}),
    ]


def test_a_damaged_row_group_costs_only_itself(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "damaged.parquet"
    write_parquet(path)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    data[first : first + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    found = outcome(path)
    assert [value for _, value in found[:300]] == ROWS[:300]
    assert found[300][0] == 301 and str(found[300][1]).startswith("damaged Parquet: 300 rows are lost")
    assert found[301:] == list(zip(range(601, 701), ROWS[600:], strict=True))


def test_reading_starts_before_the_file_is_read_whole(tmp_path: Path) -> None:
    import itertools
    import tracemalloc

    path = tmp_path / "large.jsonl"
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    path.write_bytes(line * 20_000)
    tracemalloc.start()
    assert sum(1 for row in read_rows(path) if isinstance(row, Raw)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20 < path.stat().st_size
    assert len(list(itertools.islice(read_rows(path), 3))) == 3


def test_the_suffix_says_how_a_file_is_read() -> None:
    names = ["a.jsonl", "a.b.JSONL.GZ", "a.csv.zst", "a.gz", "a", "a.jsonl.bak", "x.txt.gz"]
    assert [data_suffix(name) for name in names] == [".jsonl", ".jsonl", ".csv", "", "", "", ".txt"]


def test_a_time_zone_that_does_not_exist_is_a_reason_of_its_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    times = pa.array([1, 2], pa.timestamp("us", tz="Foo/Bar"))
    pq.write_table(pa.table({"text": ["a", "b"], "time": times}), tmp_path / "zone.parquet")
    found = list(read_rows(tmp_path / "zone.parquet"))
    assert [(type(row), row.row) for row in found] == [(Rejected, 1), (Rejected, 2)]
    assert all("unknown time zone" in row.reason and "Foo/Bar" in row.reason for row in found)


def test_a_record_of_a_table_that_is_too_long_is_not_cut_in_its_last_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (byte_streams, tables):
        monkeypatch.setattr(module, "LONGEST_LINE", 100)
    path = tmp_path / "a.csv"
    path.write_text(f"a,b\n{'x' * 80},{'y' * 80}\n{'x' * 49},{'y' * 50}\n1,2\n")
    assert outcome(path) == [(2, "longer than 64 MiB"), (3, {"a": "x" * 49, "b": "y" * 50}), (4, {"a": "1", "b": "2"})]


@pytest.mark.parametrize("name", ["lines.json", "array.json"])
def test_a_json_file_is_opened_once_more_to_find_what_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / name, []
    WRITERS[name](path)
    monkeypatch.setattr(byte_streams, "opened", lambda file: opened.append(file) or file.open("rb"))
    assert len(list(read_rows(path))) == len(ROWS) and opened == [path] * 2
