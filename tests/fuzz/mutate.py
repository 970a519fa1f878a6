"""Ways to spoil bytes, text and values; each takes the random numbers that it uses."""

from __future__ import annotations

import json
import random
from typing import Any

DEEP = 3000
ESCAPES = ["\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\u202eabc", "\u2066x"]
STRINGS = [
    "", " ", "a", "x" * 5000, "\0", "\ud800", "\ufffe", "\u202e", "日本語", "𝕏", "١٢", "~nobody/x", "foo://bar",
    "../..", "/dev/zero", "/dev/null", "/proc/self/mem", ".", "/", "<|im_end|>", "{{ x }}", "{% for", "\r", "\n\n",
    "NaN", "null", "1e400", "auto", "%s", "{}", *ESCAPES,
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 7, 1.5, -0.0, 1e300, 1e-300, 10**20, -(10**20), 2**31, 2**63, float("nan"), float("inf"), 10**4400,
]  # fmt: skip


def nested(depth: int = DEEP) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def dumped(data: Any) -> str:
    """The data as JSON; where that cannot be written, JSON that is nested too deeply."""
    try:
        return json.dumps(data)
    except (RecursionError, ValueError, TypeError):
        return '{"a": ' + "[" * DEEP + "]" * DEEP + "}"


def value(rng: random.Random) -> Any:
    """Any value that JSON can hold."""
    return rng.choice(
        [
            lambda: rng.choice(STRINGS),
            lambda: rng.choice(STRINGS),
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice([None, True, False, [], {}, [None], {"": ""}, [[]], {"a": {"b": 1}}]),
            lambda: [rng.choice(STRINGS), rng.choice(NUMBERS)],
            lambda: {rng.choice(STRINGS): rng.choice(NUMBERS)},
            lambda: nested(100) if rng.random() < 0.7 else nested(),
        ]
    )()


def spoil_value(rng: random.Random, data: Any) -> Any:
    """The same data with one of its values replaced, removed, renamed or doubled."""
    if not isinstance(data, dict | list) or not data or rng.random() > 0.85:
        return value(rng)
    return _spoil_block(rng, data) if isinstance(data, dict) else _spoil_list(rng, data)


def _spoil_block(rng: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    key = rng.choice(list(data))
    action = rng.random()
    if action < 0.5:
        return {**data, key: spoil_value(rng, data[key])}
    if action < 0.7:
        return {**data, key: value(rng)}
    if action < 0.85:
        return {k: v for k, v in data.items() if k != key}
    return {(rng.choice(STRINGS) if k == key else k): v for k, v in data.items()}


def _spoil_list(rng: random.Random, data: list[Any]) -> list[Any]:
    at = rng.randrange(len(data))
    action = rng.random()
    if action < 0.7:
        return [*data[:at], spoil_value(rng, data[at]), *data[at + 1 :]]
    return data[:at] + data[at + 1 :] if action < 0.85 else [*data, *data[at:]]


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    """The same bytes truncated, flipped, doubled, in another encoding, or with something put in."""
    if not data:
        return rng.randbytes(rng.randrange(64))
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randrange(1, 40))
    inserted = rng.choice(
        [b"\0", b"\xff\xfe", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\t", b"\r", b"\x1b[31m", b"\xe2\x80\xae", b'"',
         b"\n\n\n", b"[" * 5000, b"{" * 300, b"%", b"\\", b",", b"\xef\xbb\xbf", b"\x85", b"\x00\x00\x00\x01",
         b"1" * 5000]
    )  # fmt: skip
    return rng.choice(
        [
            lambda: data[:at],
            lambda: data[at:],
            lambda: data[:at] + data[end:],
            lambda: data[:at] + inserted + data[at:],
            lambda: data[:at] + inserted + data[at:],
            lambda: data[:at] + inserted + data[end:],
            lambda: data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :],
            lambda: data[:at] + rng.randbytes(end - at) + data[end:],
            lambda: data + data,
            lambda: b"",
            lambda: data.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "utf-16-le", "utf-7"])),
            lambda: data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b" "])),
            lambda: b"\xef\xbb\xbf" + data,
        ]
    )()
