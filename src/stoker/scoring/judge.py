"""Judge: a model behind an OpenAI-compatible address that compares two answers.

It is asked twice, with the answers in both orders, as models prefer the first or the second place (Zheng et al., 2023).
It is contacted only if the command line names it; redirects are not followed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stoker.errors import LONGEST_REASON, Problem, RunFailed, UserError, reason_of

TOKEN = "STOKER_JUDGE_TOKEN"
TRIES = 3
WAIT = 2.0  # seconds before the second try, twice as long before the third
PATIENT_TRIES = 10  # of a judge that says when to ask again (Retry-After)
LONGEST_WAIT = 60.0  # seconds, whatever it says
TIMEOUT = 120.0  # seconds
LARGEST = 1 << 22  # bytes of a response
LONGEST_VERDICT = 1024  # tokens: some models think first

CHOICES = "VERDICT: A, VERDICT: B, or VERDICT: TIE"
PROMPT = """Compare two answers to a question. Judge how right and how helpful they are, not their length or order.

[Question]
{question}

[Answer A]
{a}

[Answer B]
{b}

End with one line: {choices}."""
_CHOICES = re.compile(r"\W+".join(re.findall(r"\w+", CHOICES)), re.IGNORECASE)
_VERDICT = re.compile(r"VERDICT\W*:\W*(?:A\s+(?=TIE\b))?(A|B|TIE)\b", re.IGNORECASE)  # perhaps "a tie"
_OTHER = {"A": "B", "B": "A", "TIE": "TIE"}


UNCLEAR = "unclear"
VERDICTS = ("win", "loss", "tie", "contradictory", UNCLEAR)


@dataclass(frozen=True)
class Judgement:
    """Combined verdict of both orders about the first answer.

    Attributes:
        name: ``win``, ``loss``, ``tie`` (both orders say so), ``contradictory`` (they disagree), ``unclear`` (an order
            gave no verdict). All but the first two score as a tie; means leave out the last.
    """

    name: str

    @property
    def score(self) -> float:
        return {"win": 1.0, "loss": 0.0}.get(self.name, 0.5)

    @property
    def is_clear(self) -> bool:
        return self.name != UNCLEAR

    @property
    def turned(self) -> str:
        """The verdict about the second answer."""
        return {"win": "loss", "loss": "win"}.get(self.name, self.name)


@dataclass(frozen=True)
class Judge:
    """Address and model of a judge."""

    url: str
    model: str

    def compare(self, question: str, first: str, second: str) -> Judgement:
        """Judges which of two answers is better.

        Raises:
            RunFailed: the address does not respond.
        """
        said = self._ask(question, first, second)
        swapped = self._ask(question, second, first)
        if said is None or swapped is None:
            return Judgement(UNCLEAR)
        if said != _OTHER[swapped]:
            return Judgement("contradictory")
        return Judgement({"A": "win", "B": "loss", "TIE": "tie"}[said])

    def _ask(self, question: str, a: str, b: str) -> str | None:
        content = PROMPT.format(question=question, a=a, b=b, choices=CHOICES)
        asked = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": LONGEST_VERDICT,
        }
        answer = _request(f"{self.url}/chat/completions", asked)
        try:
            text = str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise RunFailed(f"the judge at {self.url} gave no chat completion") from error
        text = _CHOICES.sub("", text)  # a judge that repeats the prompt has not chosen
        found = _VERDICT.findall(text) or re.findall(r"^\W*(A|B|TIE)\W*$", text.strip(), re.IGNORECASE)
        return str(found[-1]).upper() if found else None


def open_judge(argument: str) -> Judge:
    """Opens the judge of ``URL[,MODEL]``; MODEL defaults to the first one that the address lists.

    Raises:
        UserError: it is not an HTTP address.
        RunFailed: it cannot be reached, or lists no model.
    """
    url, model = _url_and_model(argument)
    if not model:
        try:
            model = str(_request(f"{url}/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise RunFailed(f"the judge at {url} lists no model; write judge:{url},MODEL") from error
    return Judge(url, model)


def check_judge(name: str, argument: str, base: Path) -> None:
    """Raises UserError if the argument of ``judge:URL[,MODEL]`` is not an address; does not contact it."""
    _url_and_model(argument)


def _url_and_model(argument: str) -> tuple[str, str]:
    url, _, model = argument.partition(",")
    url = url.rstrip("/")
    if not _is_address(url):
        raise UserError(Problem(f"{url!r} is not an address of a judge", "write judge:http://HOST:PORT/v1,MODEL"))
    return url, model


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        return False
    return whole and not re.search(r"[\x00-\x20\x7f]", url)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the token to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _refusal(error: urllib.error.HTTPError) -> str:
    """Returns the status of a refused request, with the reason in the answer if it has OpenAI's form."""
    status = f"{error.code} {error.reason}"
    try:
        reason = " ".join(json.loads(error.read(LARGEST))["error"]["message"].split())
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError):
        return status
    return f"{status}: {reason[:LONGEST_REASON]}"


def _request(url: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    opener = urllib.request.build_opener(_NoRedirect)
    for attempt in itertools.count(1):
        wait = WAIT * attempt
        try:
            with opener.open(request, timeout=TIMEOUT) as response:
                return json.loads(response.read(LARGEST))
        except urllib.error.HTTPError as error:
            asked_to_wait = _retry_after(error)
            last = TRIES if asked_to_wait is None else PATIENT_TRIES
            if attempt >= last or not (error.code == 429 or error.code >= 500):
                raise RunFailed(f"the judge at {url} answered {_refusal(error)}") from error
            wait = wait if asked_to_wait is None else asked_to_wait
        except (OSError, ValueError, RecursionError, HTTPException) as error:
            if attempt >= TRIES:
                no_json = isinstance(error, json.JSONDecodeError | RecursionError)
                reason = "its answer is not JSON" if no_json else reason_of(error)
                raise RunFailed(f"the judge at {url} cannot be asked: {reason}") from error
        time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    """Returns the seconds after which a busy judge (429, 503) is to be asked again; None if it does not say."""
    stated = error.headers.get("Retry-After") if error.code in (429, 503) else None
    if stated is None:
        return None
    try:
        seconds = float(stated)
    except ValueError:  # a date (RFC 9110, section 10.2.3)
        try:
            seconds = parsedate_to_datetime(stated).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else None
