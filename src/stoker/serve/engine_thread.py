"""The thread that runs all engines. Other threads submit functions and receive futures."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stoker.generate.generation_engine import GenerationEngine

T = TypeVar("T")


@dataclass(frozen=True)
class _Task:
    """Function to run in the thread.

    Attributes:
        between: whether it changes a model, so that no engine may be in a step.
    """

    function: Callable[[], Any]
    between: bool
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)


class EngineThread:
    """Steps busy engines in turn."""

    def __init__(self) -> None:
        self.engines: list[GenerationEngine] = []
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._held: _Task | None = None  # waits until the engines pause
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread after its current step."""
        self._tasks.put(None)
        self._thread.join(timeout=10)

    def call(self, function: Callable[[], T], *, between: bool = False) -> Future[T]:
        """Runs a function in the thread, between two steps.

        Args:
            between: whether the function changes a model, or runs forward passes.
        """
        task = _Task(function, between)
        self._tasks.put(task)
        return task.future

    def _run(self) -> None:
        while not self._closed:
            if self._held is not None:
                task, self._held = self._held, None
                task.run()
            elif not any(engine.busy for engine in self.engines):
                self._take(self._tasks.get())
            for engine in list(self.engines):
                if engine.busy and not self._closed:
                    self._work(engine)

    def _work(self, engine: GenerationEngine) -> None:
        """Steps an engine until it is idle, other engines are busy too, or a task needs the model alone."""
        try:
            with ExitStack() as stack:
                stack.enter_context(engine.decoder.at_work())
                while engine.busy:
                    self._take_all()
                    if self._held is not None or self._closed:
                        return
                    engine.step()
                    if any(other.busy for other in self.engines if other is not engine):
                        return
        except Exception:
            traceback.print_exc()  # the engine has ended the generations concerned

    def _take_all(self) -> None:
        while self._held is None:
            try:
                self._take(self._tasks.get_nowait())
            except queue.Empty:
                return

    def _take(self, task: _Task | None) -> None:
        if task is None:
            self._closed = True
        elif task.between:
            self._held = task
        else:
            task.run()
