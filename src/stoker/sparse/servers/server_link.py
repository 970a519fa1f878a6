"""A trainer's connection to one server, which is restored when the server restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from stoker.errors import RunFailed
from stoker.frames import PeerRefused
from stoker.sparse.servers.server_connection import Address, Message, ServerConnection

_AGAIN = 0.1  # seconds between two attempts to reach a server
_MOST_LOSSES = 10  # times that a server may be lost before it answers a request


def waiting(patience: float) -> str:
    """Returns how long a run waits for a server that it cannot reach, in seconds, as messages state it."""
    return f"the run waits for it, at most {patience:g} s"


class ServerLink:
    """Sends requests to a server, and repeats those that may be lost after it was lost.

    Args:
        hello: the run and the sender.
        patience: seconds that a lost server gets to return.
        report: prints a line for people when the server is lost.

    Attributes:
        connection: the current one.
        losses: times that the server was lost.

    Raises:
        RunFailed: the server cannot be reached, no longer has the run's rows, or cannot continue.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        hello: Message,
        patience: float,
        report: Callable[[str], None],
    ) -> None:
        self._address, self._secret, self._hello, self._patience = address, secret, hello, patience
        self._report = report
        self._unmade: list[tuple[Message, list[np.ndarray]]] = []  # of steps that are not known to have been made
        self._asked: tuple[Message, list[np.ndarray]] | None = None
        self._streams = False  # whether a stream of parts is in progress
        self._steps: dict[int, int] = {}  # by layout, steps that it is known to have made
        self.connection: ServerConnection
        self.losses = -1
        self._unanswered = 0  # losses since the last answer
        self._connect()

    def tell(self, message: Message, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message about a step, without an answer."""
        self._check_free()
        self._unmade.append((message, list(arrays)))
        try:
            self.connection.send(*self._unmade[-1])
        except OSError:
            self._connect()

    def hint(self, message: Message, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message without an answer, which is not repeated."""
        with suppress(OSError):  # the next request finds that the server is lost
            self.connection.send(message, list(arrays))

    def ask(self, message: Message, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a request; `answer` waits for the answer."""
        self._check_free()
        self._asked = (message, list(arrays))
        try:
            self.connection.send(*self._asked)
        except OSError:
            self._connect()

    def answer(self) -> tuple[Message, list[np.ndarray]]:
        """Waits for the answer to the last request."""
        assert self._asked is not None
        while True:
            try:
                answer = self.connection.receive()
            except (OSError, PeerRefused):
                self._return()
                continue
            self._unanswered = 0
            self._check(answer[0])
            if "step" in answer[0]:
                self._made(self._asked[0]["layout"], answer[0]["step"])
            self._asked = None
            return answer

    def answers(self, message: Message) -> Iterator[tuple[Message, list[np.ndarray]]]:
        """Requests parts, until one has no name.

        After a loss of the server, the request is repeated, and the parts received before are skipped: they are the
        same as long as no step is made meanwhile, so none may be.
        """
        self.ask(message)
        self._streams = True
        given = at = 0
        try:
            while True:
                try:
                    answer = self.connection.receive()
                except (OSError, PeerRefused):
                    self._return()
                    at = 0
                    continue
                self._check(answer[0])
                if answer[0]["name"] is None:
                    break
                at += 1
                if at > given:
                    given, self._unanswered = at, 0
                    yield answer
        except GeneratorExit:  # the consumer has stopped early
            self._asked, self._streams = None, False
            self.connection.close()
            self._connect()
            raise
        self._asked, self._streams, self._unanswered = None, False, 0

    def _check_free(self) -> None:
        if self._streams:
            raise RuntimeError(f"the server of rows at {self._name} is still sending parts of a state: read them first")

    def close(self) -> None:
        """Ends the connection."""
        self.connection.close()

    def _return(self) -> None:
        """Connects to a server that was lost before it answered a request, which may be what ends it."""
        self._unanswered += 1
        if self._unanswered > _MOST_LOSSES:
            message = f"the server of rows at {self._name} was lost {self._unanswered} times before it answered"
            raise RunFailed(f"{message} a request; its output may have the reason")
        if self._unanswered > 1:
            time.sleep(_AGAIN)
        self._connect()

    def _connect(self) -> None:
        """Connects, and repeats the messages of unmade steps and the pending request."""
        self.losses += 1
        end = time.monotonic() + self._patience
        reported = self.losses == 0  # the start of a run looks for its servers itself
        while True:
            try:
                self.connection = ServerConnection.dial(self._address, self._secret)
                self.connection.send({**self._hello, "returns": self.losses > 0})
                hello, _ = self.connection.receive()
                self._check(hello)
                for layout, step in enumerate(hello["steps"]):
                    if step < self._steps.get(layout, 0):
                        self._check({"error": "it has lost steps of this run"})
                    self._made(layout, step)
                for message, arrays in [*self._unmade, *([self._asked] if self._asked else [])]:
                    self.connection.send(message, arrays)
                return
            except PeerRefused as error:
                raise RunFailed(f"the server of rows at {self._name} does not have this run's secret") from error
            except OSError as error:
                if time.monotonic() > end:
                    raise RunFailed(f"the server of rows at {self._name} cannot be reached: {error}") from error
                if not reported:
                    reported = True
                    self._report(f"the server of rows at {self._name} was lost: {error}; {waiting(self._patience)}")
                time.sleep(_AGAIN)

    def _made(self, layout: int, step: int) -> None:
        """Drops messages of steps below this one, which need not be repeated."""
        self._steps[layout] = max(step, self._steps.get(layout, 0))
        self._unmade = [
            (message, arrays)
            for message, arrays in self._unmade
            if message["layout"] != layout or message["step"] >= step
        ]

    def _check(self, answer: Message) -> None:
        if "error" in answer:
            raise RunFailed(f"the server of rows at {self._name} cannot go on: {answer['error']}")

    @property
    def _name(self) -> str:
        return "{}:{}".format(*self._address)
