"""Thread that scores rows: waiting requests are batched into one pass."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from stoker.train.ranking.ranking_scorer import Answer, RankingScorer, StoredScorer

MOST_ROWS = 4096  # rows per pass, unless a single request has more
Rows = Sequence[Mapping[str, Any]]
RowScorer = RankingScorer | StoredScorer
_Waiting = tuple[Rows, "Future[Answer]"]


class ScoreBatcher:
    """Batches the requests of one model.

    Args:
        most: most rows of a pass.
    """

    def __init__(self, scorer: RowScorer, *, most: int = MOST_ROWS) -> None:
        self.scorer, self._most = scorer, most
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="scores", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread after its current work."""
        self._waiting.put(None)
        self._thread.join(timeout=10)

    def score(self, rows: Rows) -> Future[Answer]:
        """Queues rows. The future raises the error of their scoring."""
        future: Future[Answer] = Future()
        self._waiting.put((rows, future))
        return future

    def _run(self) -> None:
        held: _Waiting | None = None
        while (first := held or self._waiting.get()) is not None:
            together, held, ends = [first], None, False
            while sum(len(rows) for rows, _ in together) < self._most:
                try:
                    following = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    ends = True
                    break
                if sum(len(rows) for rows, _ in together) + len(following[0]) > self._most:
                    held = following
                    break
                together.append(following)
            self._score([one for one in together if one[1].set_running_or_notify_cancel()])
            if ends:
                return

    def _score(self, together: list[_Waiting]) -> None:
        if not together:
            return
        try:
            answers = self.scorer.score([rows for rows, _ in together])
        except BaseException as error:
            for _, future in together:
                future.set_exception(error)
            return
        for (_, future), answer in zip(together, answers, strict=True):
            future.set_result(answer)
