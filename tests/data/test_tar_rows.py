"""WebDataset shards: which files make a sample, which columns they are, and what is refused."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.data.build_cache import find_format
from stoker.data.files.readers import decode, read_rows
from stoker.data.files.rows import Raw, Rejected
from stoker.data.sources import open_source
from stoker.job.blocks.source_block import SourceBlock


def shard(path: Path, files: list[tuple[str, bytes]]) -> bytes:
    """Writes an archive as WebDataset's writer does; returns its bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path.write_bytes(gzip.compress(buffer.getvalue()) if path.suffix == ".gz" else buffer.getvalue())
    return path.read_bytes()


def values(path: Path) -> list[Any]:
    return [decode(row) if isinstance(row, Raw) else row for row in read_rows(path)]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_files_with_one_name_up_to_the_first_dot_are_a_sample(name: str, tmp_path: Path) -> None:
    shard(
        tmp_path / name,
        [
            ("x/0.txt", b"eins"),
            ("x/0.JSON", b'{"lang": "de", "n": 1}'),
            ("x/0.jpg", bytes(5)),
            ("x/1.prompt.txt", b"Why?"),
            ("x/1.tools.json", b"[1, 2]"),
            ("x/1.cls", b"7\n"),
            ("y/1.txt", b"another folder is another sample"),
        ],
    )
    assert values(tmp_path / name) == [
        {"text": "eins", "lang": "de", "n": 1},
        {"prompt": "Why?", "tools": [1, 2], "label": "7"},
        {"text": "another folder is another sample"},
    ]


def test_broken_samples_are_refused_in_their_place(tmp_path: Path) -> None:
    shard(
        tmp_path / "a.tar",
        [
            ("0.json", b'{"text": '),
            ("1.txt", b"\xff"),
            ("2.jpg", b"1"),
            ("3.txt", b"good"),
            ("4.txt", b"once"),
            ("4.json", b'{"text": "twice"}'),
            ("5.json", b"[1]"),
            ("6.txt", b"a\0b"),
            ("7.json", b'{"text": "\\ud83d"}'),
            ("8.json", b'{"text": 1, "text": 2}'),
            ("9.json", b"[" * 100_000),
        ],
    )
    found = values(tmp_path / "a.tar")
    reasons = [row.reason.partition(":")[0] for row in found if isinstance(row, Rejected)]
    assert [row.row for row in found if isinstance(row, Rejected)] == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert found[3] == {"text": "good"}
    assert reasons == [
        "not valid JSON",
        "not valid UTF-8",
        "no text and no JSON",
        "a column occurs twice",
        "not an object",
        "NUL byte in text",
        "half a surrogate pair in a string",
        "repeated key",
        "nested too deeply",
    ]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_damaged_archive_gives_the_samples_before_the_damage(name: str, tmp_path: Path) -> None:
    import random

    bodies = [random.Random(n).randbytes(4000).hex().encode() for n in range(6)]
    whole = shard(tmp_path / name, [(f"{n}.txt", body) for n, body in enumerate(bodies)])
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    *rows, last = values(tmp_path / name)
    assert 1 <= len(rows) < 6
    assert [row["text"].encode() for row in rows] == bodies[: len(rows)]
    assert isinstance(last, Rejected) and last.reason.startswith("damaged archive") and last.row == len(rows) + 1


@pytest.mark.parametrize(
    ("damage", "rows"),
    [
        (lambda data: data[:2100] + bytes([data[2100] ^ 1]) + data[2101:], 1),  # a byte of the third header
        (lambda data: data[:3100], 2),  # within the fourth header
        (lambda data: data[:3072], 2),  # between two files
    ],
)
def test_a_damaged_header_is_no_end(damage: Callable[[bytes], bytes], rows: int, tmp_path: Path) -> None:
    """Nor the end of the sample before it, of which files may be missing."""
    whole = shard(tmp_path / "a.tar", [(f"{n}.txt", b"row %d" % n) for n in range(6)])
    (tmp_path / "a.tar").write_bytes(damage(whole))
    *found, last = values(tmp_path / "a.tar")
    assert found == [{"text": f"row {n}"} for n in range(rows)]
    assert isinstance(last, Rejected) and last.reason.startswith("damaged archive: ") and last.row == rows + 1


SPARSE_1_0 = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "5"}


@pytest.mark.parametrize("pax", [{"GNU.sparse.map": "x,y"}, {"GNU.sparse.size": "x"}, SPARSE_1_0])
def test_a_malformed_sparse_file_is_damage(pax: dict[str, str], tmp_path: Path) -> None:
    """The last kind has a map of a million entries, of which none is there."""
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, headers in (("0.txt", {}), ("1.txt", {}), ("2.txt", pax)):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 8, headers
            archive.addfile(info, io.BytesIO(b"1000000\n"))
    first, last = values(tmp_path / "a.tar")
    assert first == {"text": "1000000\n"}
    assert isinstance(last, Rejected) and last.row == 2 and last.reason.startswith("damaged archive: ")


def test_a_sparse_file_with_a_map_of_its_own_is_damage(tmp_path: Path) -> None:
    """Cut off within the map, or with a map without end."""
    good = shard(tmp_path / "good.tar", [("0.txt", b"text"), ("1.txt", b"partial")])[:2048]
    header = bytearray(_header(tarfile.GNUTYPE_SPARSE, 5))
    header[482], header[483:495] = 1, b"00000000005\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    for name, rest in (("cut", b""), ("long", bytes(504) + b"\1" + bytes(7))):
        (tmp_path / f"{name}.tar").write_bytes(good + header + rest * 10)
        [first, damage] = values(tmp_path / f"{name}.tar")
        assert first == {"text": "text"} and "damaged archive: a sparse file" in damage.reason


def test_headers_of_earlier_files_are_not_kept(tmp_path: Path) -> None:
    for pax in (tarfile.XHDTYPE, tarfile.XGLTYPE):
        content = b"".join(
            _header(pax, 2**19)
            + (b"%d c%d=" % (2**19, n)).ljust(2**19 - 1, b"x")
            + b"\n"
            + shard(tmp_path / "one.tar", [(f"{n}.txt", b"text")])[:1024]
            for n in range(40)
        )
        (tmp_path / "a.tar").write_bytes(content + bytes(1024))
        tracemalloc.start()
        assert values(tmp_path / "a.tar") == [{"text": "text"}] * 40
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
        tracemalloc.stop()


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no archive" * 100)
    assert [row.reason.partition(":")[0] for row in values(tmp_path / "a.tar")] == ["damaged archive"]


def test_shards_are_a_source_whose_format_is_found(tmp_path: Path) -> None:
    for number in range(3):
        content = b'{"prompt": "%d", "completion": "c"}' % number
        shard(tmp_path / f"d-{number:06d}.tar", [(f"{number}.json", content)])
    source = open_source(SourceBlock(path="d-*.tar"), tmp_path)
    assert find_format(source, {}) == "prompt"
    assert [decode(row)["prompt"] for row in source.rows() if isinstance(row, Raw)] == ["0", "1", "2"]  # type: ignore[index]


def _header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_headers_cannot_take_all_memory_or_the_stack(kind: bytes, tmp_path: Path) -> None:
    good = shard(tmp_path / "good.tar", [("0.txt", b"text"), ("1.txt", b"partial")])[:2048]
    content = b"name".ljust(512, b"\0") if kind in (b"L", b"K") else b"12 path=abc\n".ljust(512, b"\0")
    many = (_header(kind, 5 if kind in (b"L", b"K") else 12) + content) * 1500
    (tmp_path / "many.tar.gz").write_bytes(gzip.compress(good + many))
    [first, damage] = values(tmp_path / "many.tar.gz")
    assert first == {"text": "text"} and "damaged archive: more than 16 headers" in damage.reason
    (tmp_path / "long.tar.gz").write_bytes(gzip.compress(good + _header(kind, 1 << 33) + bytes(1 << 16)))
    [first, damage] = values(tmp_path / "long.tar.gz")
    assert first == {"text": "text"} and f"damaged archive: a header of {1 << 33} bytes" in damage.reason
