"""Steps take the number of threads that is faster at the moment."""

from __future__ import annotations

from stoker.generate.step_threads import SHARE, TRIED, StepThreads


class Machine:
    """Steps of known length, by threads."""

    def __init__(self, most: int = 4) -> None:
        self.seconds = {most: 1.0, 1: 2.0}
        self.now, self.threads = 0.0, most
        self.log: list[int] = []
        self.steps = StepThreads(most, clock=lambda: self.now, use=self.use)

    def use(self, threads: int) -> None:
        self.threads = threads

    def run(self, steps: int, rows: int = 1) -> list[int]:
        """The threads of each step."""
        first = len(self.log)
        for _ in range(steps):
            with self.steps.step(rows):
                self.log.append(self.threads)
                self.now += self.seconds[self.threads]
        return self.log[first:]


def test_all_threads_are_kept_where_they_are_faster() -> None:
    machine = Machine()
    assert machine.run(2 * TRIED) == [4] * TRIED + [1] * TRIED
    assert set(machine.run(100)) == {4}
    assert machine.threads == 4  # for what is between steps, too


def test_one_thread_is_taken_while_other_work_has_the_cores() -> None:
    machine = Machine()
    machine.run(200)
    machine.seconds[4] = 30.0  # threads wait for a core
    began = machine.now
    machine.run(20)
    assert machine.log[-1] == 1 and machine.now - began < 10 * 30
    machine.seconds[4] = 1.0
    machine.run(4000)
    assert machine.log[-1] == 4


def test_trials_take_a_small_share_of_the_time() -> None:
    machine = Machine()
    machine.seconds[1] = 10.0
    machine.run(2 * TRIED)
    began, tried = machine.now, machine.run(5000).count(1) * machine.seconds[1]
    assert 0 < tried / (machine.now - began) < 1.1 * SHARE


def test_steps_of_other_sizes_are_not_compared() -> None:
    machine = Machine()
    for _ in range(50):
        machine.run(TRIED - 1, rows=1)
        machine.run(TRIED - 1, rows=16)
    assert set(machine.log) == {4}


def test_one_thread_is_left_alone() -> None:
    machine = Machine(most=1)
    assert set(machine.run(50)) == {1}
