"""Traffic and latency of a server of models, by model and key, from its ``/metrics``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COUNTERS = {
    "stoker_prompt_tokens_total": "prompt_tokens",
    "stoker_answer_tokens_total": "answer_tokens",
    "stoker_rows_scored_total": "rows",
    "stoker_answer_seconds_count": "answers",
}
TIMES = {"stoker_first_token_seconds_bucket": "first_token", "stoker_answer_seconds_bucket": "answer_seconds"}
GAUGES = {
    "stoker_requests_in_flight": "in_flight",
    "stoker_answers_waiting": "waiting",
    "stoker_answers_running": "running",
}
QUANTILES = {"p50": 0.5, "p95": 0.95}
UNASKED = ("/health", "/metrics", "/v1/models")  # paths whose requests are not traffic of the models


@dataclass
class _Row:
    """Counts of one model and key; ``times`` are cumulative counts by the upper bound of their bucket."""

    counts: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))


def traffic_of(text: str) -> dict[str, Any]:
    """Counts, tokens and quantiles of times in seconds by model and key; requests that failed, wait and run.

    Args:
        text: of ``/metrics``, in Prometheus' format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    rows: dict[tuple[str, str], _Row] = defaultdict(_Row)
    now, requests, refused = dict.fromkeys(GAUGES.values(), 0.0), 0.0, 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            row = (
                rows[sample.labels.get("model", ""), sample.labels.get("key", "")] if "model" in sample.labels else None
            )
            if sample.name in GAUGES:
                now[GAUGES[sample.name]] += sample.value
            elif sample.name == "stoker_requests_total" and sample.labels["path"] not in UNASKED:
                requests += sample.value
                refused += sample.value if sample.labels["status"] >= "400" else 0.0
            elif row is not None and sample.name in COUNTERS:
                row.counts[COUNTERS[sample.name]] = sample.value
            elif row is not None and sample.name in TIMES:
                row.times[TIMES[sample.name]].append((float(sample.labels["le"]), sample.value))
    listed = [
        {"model": model, "key": key, **dict.fromkeys(COUNTERS.values(), 0.0), **row.counts}
        | {name: _quantiles(row.times.get(name, ())) for name in TIMES.values()}
        for (model, key), row in sorted(rows.items())
        if row.counts
    ]
    return {"rows": listed, "requests": requests, "refused": refused, **now}


def _quantiles(buckets: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    return {name: quantile(share, buckets) for name, share in QUANTILES.items()}


def quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    """Returns a quantile of a histogram, as Prometheus' ``histogram_quantile`` estimates it: linear within a bucket.

    Args:
        buckets: (upper bound, how many were at most that), the last bound infinite.

    Returns:
        None without any observation; of those beyond the last finite bound, that bound.
    """
    ordered = sorted(buckets)
    total = ordered[-1][1] if ordered else 0.0
    if not total:
        return None
    least, below = 0.0, 0.0
    for bound, count in ordered:
        if count >= share * total:
            if bound == float("inf"):
                return least
            return least + (bound - least) * (share * total - below) / (count - below)
        least, below = bound, count
    return least
