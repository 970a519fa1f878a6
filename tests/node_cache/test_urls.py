"""URLs: what is one, what cannot be opened and what to install for it, patterns, and what messages show."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec

import pytest

from stoker.node_cache.job_urls import is_named
from stoker.node_cache.masked_urls import mask_urls
from stoker.node_cache.urls import (
    expand_braces,
    has_magic,
    is_url,
    name_of,
    strip_signature,
    url_problem,
    without_secrets,
)


@pytest.mark.parametrize("text", ["s3://b/k", "HTTPS://h/x", "hdfs://n:8020/x", "simplecache::s3://b/k", "memory://x"])
def test_urls(text: str) -> None:
    assert is_url(text)


@pytest.mark.parametrize("text", ["a.jsonl", "org/name", "C:/x", "file:///x", "local:///x", "./a://b", "a: b://"])
def test_paths_and_files_of_this_machine_are_none(text: str) -> None:
    assert not is_url(text)


def test_a_scheme_that_nothing_knows_names_the_nearest_one() -> None:
    assert url_problem("s4://b/k") == ("there is no kind of store s4:// (s4://b/k)", "did you mean s3://?")


@pytest.mark.parametrize(
    ("url", "extra", "package"), [("gs://b/k", "gs", "gcsfs"), ("oss://b/k", "oss", "ossfs"), ("s3://b", "s3", "s3fs")]
)
def test_a_package_that_is_missing_names_its_extra(
    url: str, extra: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(scheme: str) -> object:
        raise ImportError(f"Install {package}")

    if find_spec(package):
        monkeypatch.setattr(sys.modules["fsspec.registry"], "get_filesystem_class", lacking)
    message, hint = url_problem(url) or ("", "")
    assert url in message and hint == f"pip install 'stoker[{extra}]'"


@pytest.mark.parametrize(
    "url",
    [
        *("simplecache::https://h/x", "reference://x", "zip://a::s3://b/c.zip", "dir://x", "filecache://x", "zip://x"),
        *("simplecache://x", "blockcache://x", "cached://x", "tar://x", "libarchive://x", "generic://x", "data://x"),
    ],
)
def test_urls_that_lead_to_others_are_refused(url: str) -> None:
    assert "leads to another URL" in (url_problem(url) or ("",))[0]


def test_messages_show_no_password_and_no_signature() -> None:
    assert without_secrets("https://me:secret@h:8/a/b.jsonl?X-Amz-Signature=1#x") == "https://h:8/a/b.jsonl"
    assert without_secrets("sftp://me:secret@h/a") == "sftp://me@h/a"
    assert without_secrets("abfs://container@account/a#1?.txt") == "abfs://container@account/a#1?.txt"
    assert name_of("https://h/a/b.jsonl?c=/d") == "b.jsonl" and name_of("s3://b/a/k/") == "k"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/x?X-Amz-Signature=1&X-Amz-Date=2&part=3", "https://h/x?part=3"),
        ("https://h/x?sv=1&sp=r&sig=2", "https://h/x"),
        ("https://h/x?sp=2", "https://h/x?sp=2"),
        ("https://h/x?Expires=1&Signature=2&Key-Pair-Id=3", "https://h/x"),
        ("https://h/x?token=1&id=2", "https://h/x?id=2"),
        ("https://h/x?X-Goog-Signature=1&X-Goog-Date=2&id=3", "https://h/x?id=3"),
        ("https://h/x?x-oss-signature=1&x-oss-expires=2&id=3", "https://h/x?id=3"),
        ("https://h/x?AWSAccessKeyId=1&Expires=2&Signature=3&id=4", "https://h/x?id=4"),
        ("https://h/x?GoogleAccessId=1&Expires=2&Signature=3", "https://h/x"),
        ("https://h/x?OSSAccessKeyId=1&Expires=2&Signature=3", "https://h/x"),
        ("s3://b/x?token=1", "s3://b/x?token=1"),
    ],
)
def test_a_signature_does_not_name_an_object(url: str, expected: str) -> None:
    assert strip_signature(url) == expected


def test_ranges_are_written_out_as_webdataset_does() -> None:
    assert list(expand_braces("s3://b/{08..10}-{0..1}.tar")) == [
        f"s3://b/{i}-{j}.tar" for i in ("08", "09", "10") for j in (0, 1)
    ]
    ends = {"{00..100}": ("000", "100"), "{1..010}": ("001", "010"), "{0..10}": ("0", "10"), "{9..10}": ("9", "10")}
    for written, (first, last) in ends.items():
        found = list(expand_braces(f"s3://b/{written}.tar"))
        assert found[:: len(found) - 1] == [f"s3://b/{first}.tar", f"s3://b/{last}.tar"]
        assert all(is_named(url, [f"s3://b/{written}.tar"]) for url in found)
    assert not is_named("s3://b/01.tar", ["s3://b/{00..100}.tar"])
    with pytest.raises(ValueError, match="is not a range"):
        list(expand_braces("s3://b/{3..1}.tar"))
    for written in ("{1..1000001}", f"{{0..{10**30}}}", "{1..1001}/{1..1000}"):
        with pytest.raises(ValueError, match="more than 1,000,000 URLs"):
            list(expand_braces(f"s3://b/{written}.tar"))


def test_a_question_mark_in_a_query_makes_no_pattern() -> None:
    assert has_magic("s3://b/a?.jsonl") and has_magic("https://h/*.jsonl") and not has_magic("https://h/a.jsonl?x=[1]")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/data/x.jsonl", True),
        ("s3://b/data/sub/x.jsonl", True),
        ("s3://b/shard-003.tar", True),
        ("s3://b/parts/a-1.jsonl", True),
        ("s3://b/one.jsonl", True),
        ("s3://b/one.jsonl2", False),
        ("s3://b/database/x", False),
        ("s3://b/data/../secret", False),
        ("s3://other/data/x.jsonl", False),
        ("http://h/latest/meta-data", False),
        ("http://h/data/%2e%2e/secret", False),
        ("http://h/data/%252E%252e/secret", False),
        ("http://h/data/..?x", False),
        ("http://h/data/.\t./secret", False),
        ("http://h/02/a.tar?sig=1", True),
        ("http://h/02/a.tar?sig=2", False),
        ("http://h/2/a.tar?sig=1", False),
        ("http://h/04/a.tar?sig=1", False),
        ("http://h/secret", False),
        ("http://h1/2", False),
        ("http://h/data/x\n", False),
        ("s3://b/shard-010.tar", False),
        ("s3://b/shard-other", False),
        ("s3://b/parts/a-1.secret", False),
        ("s3://b/parts/a-1/secret/x.jsonl", False),
    ],
)
def test_only_what_a_job_names_is_given_to_other_nodes(url: str, expected: bool) -> None:
    named = ["s3://b/data/", "s3://b/shard-{000..009}.tar", "s3://b/parts/a-*.jsonl", "s3://b/one.jsonl", "http://h*/x"]
    named += ["http://h/data/", "http://h/{00..03}/a.tar?sig=1", "http://h{0..3}/{0..3}"]
    assert is_named(url, named) is expected


def test_the_urls_of_a_job_are_found_wherever_they_are() -> None:
    from stoker.job.schema import Job
    from stoker.node_cache.job_urls import urls_of

    job = Job(task="sft", model={"name": "s3://b/m"}, data=[{"path": "https://h/x.jsonl"}, {"path": "y.jsonl"}])
    assert sorted(urls_of(job)) == ["https://h/x.jsonl", "s3://b/m"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h/0?password=hunter2", "redis://h/0"),
        ("redis://h?password=hunter2", "redis://h"),
        ("rediss://:hunter2@h/0?prefix=p&username=hunter2&db=1", "rediss://@h/0?prefix=p&db=1"),
        ("unix:///run/redis.sock?password=hunter2&db=2", "unix:///run/redis.sock?db=2"),
        ("https://user:hunter2@[x/a?token=hunter2", "https://[x/a"),
        ("https://[x#hunter2", "https://[x"),
        ("s3://bucket/what?.txt", "s3://bucket/what?.txt"),
    ],
)
def test_a_redis_server_and_a_malformed_address_show_no_password(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize("mark", "\uff03\uff1a\uff1f\uff0f\uff20")  # full-width # : ? / @
def test_a_full_width_character_shows_no_password(mark: str) -> None:
    for url in (f"https://user:hunter2{mark}1@h/x", f"https://user:hunter2{mark}h/x@y", f"https://u{mark}hunter2@h/x"):
        problem = url_problem(url)
        assert problem is None or "hunter2" not in " ".join(problem), problem
    assert url_problem("https://user:hunter2\uff20h/x") == (
        "https://h/x is not an address",
        "write it as https://host/path",
    )


@pytest.mark.parametrize("url", ["https://[x", "http://a]b/c"])
def test_a_malformed_address_is_named(url: str) -> None:
    problem = url_problem(url)
    assert problem is not None and problem[0] == f"{url} is not an address"


def test_masking_takes_no_quadratic_time() -> None:
    began = time.monotonic()
    assert mask_urls("x=" + "a" * 200_000 + " http://u:pw@h") == "x=" + "a" * 200_000 + " http://***@h"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://token@h/x", "at https://***@h/x"),
        ("sftp://me@h/x and sftp://me:pw@h/x", "sftp://me@h/x and sftp://me:***@h/x"),
        *(
            (f"https://h/x?id=1&{key}=pw&b=2", f"https://h/x?id=1&{key}=***&b=2")
            for key in ("sig", "Signature", "token", "access_token", "password", "api_key", "apikey", "Policy")
        ),
        *(
            (f"https://h/x?{key}=pw", f"https://h/x?{key}=***")
            for key in ("X-Amz-Signature", "X-Goog-Credential", "x-oss-signature", "Key-Pair-Id", "AWSAccessKeyId")
        ),
        ("x?GoogleAccessId=pw", "x?GoogleAccessId=***"),
        ("x?OSSAccessKeyId=pw", "x?OSSAccessKeyId=***"),
        ("https://h/x?page=2", "https://h/x?page=2"),
    ],
)
def test_secrets_of_urls_in_a_text_are_masked(text: str, shown: str) -> None:
    assert mask_urls(text) == shown
