"""Prometheus metrics of ``/metrics``."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from stoker.serve.served_models.served import Models

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CALLER: ContextVar[str] = ContextVar("caller", default="")  # name of the request's key
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Engines(Collector):
    """Collects the engines' metrics on request."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> list[GaugeMetricFamily]:
        """Returns the numbers of waiting and running answers."""
        waiting = GaugeMetricFamily("stoker_answers_waiting", "Answers whose prompt has not begun", labels=["base"])
        running = GaugeMetricFamily("stoker_answers_running", "Answers that are being written", labels=["base"])
        for base in {host.base: None for host in self._models.hosts}:
            engines = [host.engine for host in self._models.hosts if host.base == base]
            waiting.add_metric([base], sum(engine.waiting for engine in engines))
            running.add_metric([base], sum(engine.running for engine in engines))
        return [waiting, running]


class Metrics:
    """Counters of a server, with the labels ``model`` (served name) and ``key`` (name of the caller's key, or
    empty).
    """

    def __init__(self, models: Models | None = None) -> None:
        self.registry = CollectorRegistry()
        if models is not None:
            self.registry.register(_Engines(models))
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("stoker_requests", "Requests by status", ["path", "status"], **own)
        self.in_flight = Gauge("stoker_requests_in_flight", "Requests that have not been answered", **own)
        self.prompt_tokens = Counter("stoker_prompt_tokens", "Tokens of prompts", ["model", "key"], **own)
        self.shared_tokens = Counter(
            "stoker_prompt_tokens_shared", "Of them, taken from earlier ones", ["model", "key"], **own
        )
        self.answer_tokens = Counter("stoker_answer_tokens", "Tokens of answers", ["model", "key"], **own)
        self.first_token = Histogram(
            "stoker_first_token_seconds",
            "From the request to its first token",
            ["model", "key"],
            buckets=SECONDS,
            **own,
        )
        self.answers = Histogram(
            "stoker_answer_seconds",
            "From the request to the end of its answer",
            ["model", "key"],
            buckets=SECONDS,
            **own,
        )
        self.duration = Histogram(
            "stoker_request_seconds", "From the request to its end", ["path"], buckets=SECONDS, **own
        )
        self.rows = Counter("stoker_rows_scored", "Rows scored by ranking models", ["model", "key"], **own)
        self.step = Gauge("stoker_model_step", "Step of the run whose tower scored last", ["model"], **own)
        self.cancelled = Counter("stoker_requests_cancelled", "Requests whose client left", **own)

    def text(self) -> bytes:
        """Returns the text of the page."""
        return generate_latest(self.registry)
