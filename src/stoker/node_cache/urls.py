"""URLs of data and models: recognises, checks and masks them. No network, no heavy import."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import chain, product
from math import prod
from pathlib import PurePosixPath
from urllib.parse import urlsplit, urlunsplit

from stoker.online_store.store_urls import shown_part, without_secret_parameters

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")  # with the colons of a chain, which is refused later
LOCAL = ("file", "local")
WEB = ("http", "https")
# Requirements of a scheme in addition to fsspec: Stoker's extra that installs it, or the package if there is no extra.
EXTRAS = {
    **dict.fromkeys(WEB, "http"),
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("oss",), "oss"),
    **dict.fromkeys(("hdfs", "arrow_hdfs"), "hdfs"),
}
# These open a URL within a URL, or render templates from a file: their targets are not in the job.
WRAPPERS = {
    *("reference", "filecache", "simplecache", "blockcache", "cached", "dir", "zip", "tar", "libarchive", "generic"),
    *("data", "asyncwrapper", "async_wrapper", "asynclocal", "dask", "jlab", "jupyter", "pyscript"),
}
# What belongs to a signature in a query, by the key that shows that there is one: SAS of Azure, and older kinds of
# S3, CloudFront, GCS and OSS. `SIGNED_BY`: how keys of the newer kinds begin.
_SAS = "sig se sp sv sr st ss srt spr si sip skoid sktid skt ske sks skv sdd"
_OLDER = "signature expires policy key-pair-id awsaccesskeyid googleaccessid ossaccesskeyid"
SIGNATURES = {"sig": frozenset(_SAS.split()), "signature": frozenset(_OLDER.split())}
SIGNED_BY = ("x-amz-", "x-goog-", "x-oss-")
AT = str.maketrans("\uff20\ufe6b", "@@")  # the full-width and the small one
MAGIC = re.compile(r"[*?\[]")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MOST_EXPANDED = 1_000_000


def is_url(text: str) -> bool:
    """Returns whether a path of the job is a URL of a store. Those of files on this machine count as paths."""
    return bool(URL.match(text)) and scheme_of(text) not in LOCAL


def scheme_of(url: str) -> str:
    """``s3`` of ``s3://bucket/key``."""
    return url.partition("://")[0].lower()


def without_secrets(url: str) -> str:
    """Returns the URL for messages and records: without a password, and on the web without the query, which may contain
    a signature. In other stores ``?`` and ``#`` are part of names, and the text before an ``@`` part of the place; of
    the parameters of a Redis server only those without secrets are kept.
    """
    if scheme_of(url) in WEB:
        try:
            parts = urlsplit(url)
        except ValueError:
            return shown_part(url.translate(AT))
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    scheme, place, path = _split(without_secret_parameters(url))
    user, at, host = place.rpartition("@")
    return f"{scheme}{user.partition(':')[0]}{at}{host}{path}"


def restore_secrets(kept: list[str], asked: str) -> list[str]:
    """Restores the URLs of an answer that was stored `without_secrets`, with the secrets of the request.

    Args:
        asked: the URL, range, folder or pattern of the request.
    """
    if kept == [without_secrets(asked)]:
        return [asked]
    urls = list(expand_braces(asked)) if RANGE.search(asked) and not has_magic(asked) else []
    if kept == [without_secrets(url) for url in urls]:
        return urls
    place, shown_place = _split(asked)[1], _split(without_secrets(asked))[1]
    parts = map(_split, kept)
    return [f"{scheme}{place if there == shown_place else there}{path}" for scheme, there, path in parts]


def _split(url: str) -> tuple[str, str, str]:
    """``sftp://``, ``me@host`` and ``/path``."""
    scheme, mark, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    return scheme + mark, place, slash + path


def strip_signature(url: str) -> str:
    """Returns the URL without its signature: the part that identifies the object for as long as it exists."""
    if scheme_of(url) not in WEB or "?" not in url:
        return url
    address, _, query = url.partition("?")
    parts = query.split("&")
    names = {part.partition("=")[0].lower() for part in parts}
    dropped = {"token"}.union(*(SIGNATURES[name] for name in SIGNATURES.keys() & names))
    kept = [
        part
        for part in parts
        if (name := part.partition("=")[0].lower()) not in dropped and not name.startswith(SIGNED_BY)
    ]
    return f"{address}?{'&'.join(kept)}" if kept else address


def name_of(url: str) -> str:
    """Returns the last part of the path."""
    path = urlsplit(url).path if scheme_of(url) in WEB else url.partition("://")[2]
    return PurePosixPath(path.rstrip("/")).name


def url_problem(url: str) -> tuple[str, str] | None:
    """Returns (problem, suggestion) if no library can open a URL, else None."""
    from fsspec.registry import get_filesystem_class, known_implementations

    scheme = scheme_of(url)
    if "::" in url or scheme in WRAPPERS:
        return f"{without_secrets(url)} leads to another URL", "write the one URL where the object is"
    try:
        urlsplit(url)
    except ValueError:  # whose text contains the password
        return f"{without_secrets(url)} is not an address", "write it as https://host/path"
    try:
        get_filesystem_class(scheme)
    except ValueError:
        near = get_close_matches(scheme, [*EXTRAS, *known_implementations], 1, 0.5)
        usual = "s3, gs, oss, hdfs, http and https"
        hint = f"did you mean {near[0]}://?" if near else f"usual are {usual}"
        return f"there is no kind of store {scheme}:// ({without_secrets(url)})", hint
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        hint = f"pip install 'stoker[{extra}]'" if extra else " ".join(str(error).split())
        return f"{without_secrets(url)} needs a package that is not installed", hint
    return None


def place_problem(url: str) -> tuple[str, str] | None:
    """Returns (problem, suggestion) if nothing can be stored at a URL, else None."""
    if scheme_of(url) in WEB:
        hint = "give a folder, or a URL of a store, such as s3://, gs:// or hdfs://"
        return f"files of a web server are read only ({without_secrets(url)})", hint
    return url_problem(url)


def expand_braces(url: str) -> Iterator[str]:
    """``a-{00..02}.tar`` written out, as WebDataset does: ``a-00.tar``, ``a-01.tar``, ``a-02.tar``.

    Raises:
        ValueError: a range runs backwards, or there are more than `MOST_EXPANDED` URLs.
    """
    ranges = [(match, range(int(match[1]), int(match[2]) + 1)) for match in RANGE.finditer(url)]
    for match, numbers in ranges:
        if not numbers:
            raise ValueError(f"{match[0]} is not a range")
    if prod(numbers.stop - numbers.start for _, numbers in ranges) > MOST_EXPANDED:
        raise ValueError(f"its ranges give more than {MOST_EXPANDED:,} URLs")
    ends = [0, *(match.end() for match, _ in ranges)]
    texts = [url[end : match.start()] for end, (match, _) in zip(ends, ranges, strict=False)]
    written = ([number_in_range(number, *match.groups()) for number in numbers] for match, numbers in ranges)
    for chosen in product(*written):
        yield "".join(chain.from_iterable(zip(texts, chosen, strict=True))) + url[ends[-1] :]


def number_in_range(number: int, first: str, last: str) -> str:
    """Writes a number of a range: all with as many digits as the longer end, if an end begins with 0."""
    pads = any(end[0] == "0" and len(end) > 1 for end in (first, last))
    return f"{number:0{max(len(first), len(last)) if pads else 1}d}"


def has_magic(url: str) -> bool:
    """Returns whether a URL is a pattern. In the query of an HTTP address a question mark is not a wildcard."""
    return bool(MAGIC.search(urlsplit(url).path if scheme_of(url) in WEB else url))
