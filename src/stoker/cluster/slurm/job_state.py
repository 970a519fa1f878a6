"""The state of a job: from squeue while it knows the job, then from sacct, then from the job's own exit code."""

from __future__ import annotations

import shlex
import signal
from dataclasses import dataclass

from stoker.cluster.shell import Shell, ShellFailed
from stoker.cluster.target import State, Status
from stoker.resilience.deadline import SIGNAL_EXIT

WAITING = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "SUSPENDED",
    "RESV_DEL_HOLD",
)
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED")
STOPPED = ("CANCELLED", "PREEMPTED", "REVOKED")

# Reasons of squeue that a user meets, explained (man squeue, "JOB REASON CODES").
REASONS = {
    "None": "",
    "Priority": "jobs with a higher priority are before it",
    "Resources": "it is next, and waits until enough nodes are free",
    "Dependency": "a job that it depends on has not ended",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "BeginTime": "its begin time has not come; after a requeue that takes a moment",
    "JobHeldUser": "it is held by its user: `scontrol release`",
    "JobHeldAdmin": "it is held by an administrator",
    "JobLaunchFailure": "it could not be started: the log of slurmd on the node says why",
    "launch failed requeued held": "it could not be started and is held: `scontrol release` tries again",
    "Licenses": "it waits for a licence",
    "Reservation": "it waits for its reservation",
    "ReservationDeleted": "its reservation was removed",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
    "PartitionNodeLimit": "it wants more nodes than its partition allows",
    "PartitionTimeLimit": "its `time` is longer than its partition allows",
    "PartitionConfig": "it wants more than its partition has",
    "BadConstraints": "no node has what it asks for: see `gres`, `constraint`, `cpus`, `memory`",
    "NodeDown": "a node that it needs is down",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "InactiveLimit": "it reached the limit of its partition's inactivity",
    "InvalidAccount": "its `account` is not valid",
    "InvalidQOS": "its `qos` is not valid",
    "AccountNotAllowed": "its `account` may not use this partition",
    "QOSNotAllowed": "its `qos` may not be used in this partition",
    "JobArrayTaskLimit": "as many of its array run as may",
    "Cleaning": "it was requeued, and its earlier start is being cleaned up",
    "Prolog": "the nodes run their prolog",
    "TimeLimit": "it reached its time limit",
    "NonZeroExitCode": "it ended with an error",
    "NodeFail": "a node failed",
    "OutOfMemory": "it used more memory than it had asked for: see `memory`",
    "QOSMaxJobsPerUserLimit": "you have as many jobs running as the qos allows",
    "QOSMaxGRESPerUser": "you use as many GPUs as the qos allows",
    "QOSMaxNodePerUserLimit": "you use as many nodes as the qos allows",
    "QOSMaxWallDurationPerJobLimit": "its `time` is longer than the qos allows",
    "AssocGrpGRES": "the account uses as many GPUs as it may",
    "AssocGrpNodeLimit": "the account uses as many nodes as it may",
    "AssocMaxJobsLimit": "you have as many jobs running as the account allows",
    "AssocGrpBillingMinutes": "the account's budget is used up",
}


@dataclass(frozen=True)
class JobState:
    """A job's state in Slurm's terms.

    Attributes:
        state: such as ``PENDING``; empty if Slurm no longer knows the job.
        reason: Slurm's reason why it waits or has ended.
        nodes: their list, such as ``gpu[01-02]``.
        code: exit code; None while it has not ended.
        restarts: number of times that it was requeued.
    """

    state: str
    reason: str = ""
    nodes: str = ""
    code: int | None = None
    restarts: int = 0

    def status(self, own_code: int | None, requeue: int | None, ended_by: str = "") -> Status:
        """Converts the state to Stoker's status.

        Args:
            own_code: the exit code that the job's script has left; None if it has not ended.
            requeue: `faults.requeue` of the job.
            ended_by: what ended the job, as text, by its exit code file; empty if that does not say.
        """
        code = self.code if own_code is None else own_code
        nodes = [self.nodes] if self.nodes not in ("", "(null)", "None assigned") else []
        words = reason_in_words(self.reason)
        if self.state in WAITING:
            return Status("waiting", words or self.state.lower(), nodes)
        has_ended = self.state == "COMPLETING" and own_code is not None  # a lost node may keep it there for minutes
        if self.state in RUNNING and not has_ended:
            again = f"started {self.restarts + 1} times" if self.restarts else ""
            return Status("running", again, nodes)
        if not self.state and own_code is None:
            return Status("lost", "Slurm no longer knows the job, and it has left no exit code")
        if own_code == 0:  # also where Slurm reports a node that was lost on the way
            return Status("done", "", nodes)
        return Status(_ending(self.state, code, requeue), _why(self.state, code, words, ended_by), nodes)


def reason_in_words(reason: str) -> str:
    """Explains a reason of squeue; the details after a comma are kept unchanged."""
    name, _, rest = reason.strip("()").partition(",")
    if name in REASONS:
        words = REASONS[name]
        return f"{words} ({rest.strip()})" if words and rest.strip() else words
    return reason.strip("()")


def _ending(state: str, code: int | None, requeue: int | None) -> State:
    if state == "COMPLETED":
        return "done"
    asked = code is not None and code in (SIGNAL_EXIT + signal.SIGTERM, requeue)
    return "stopped" if state in STOPPED or asked else "failed"


def _why(state: str, code: int | None, words: str, ended_by: str) -> str:
    reasons = {
        "TIMEOUT": REASONS["TimeLimit"],
        "OUT_OF_MEMORY": REASONS["OutOfMemory"],
        "NODE_FAIL": REASONS["NodeFail"],
    }
    if state in reasons:
        return reasons[state]
    if state in STOPPED:
        return state.lower()
    if ended_by:
        return ended_by
    ended = f"ended with exit code {code}" if code else ""
    return ended or ("" if state == "COMPLETED" else words)


def job_state(shell: Shell, job: str) -> JobState:
    """Returns the job's state from squeue or, later, sacct; an empty state if neither knows it.

    Raises:
        ShellFailed: Slurm does not answer.
    """
    job = shlex.quote(job)
    try:
        line = shell.run(
            f"squeue --noheader --states=all --jobs={job} --Format='State:32,RestartCnt:8,NodeList:256,Reason:256'"
        )
        found = _from_squeue(line.decode())
    except ShellFailed as error:
        if "Invalid job id" not in error.stderr:
            raise
        found = None
    if found is not None and found.state in (*WAITING, *RUNNING):
        return found
    return _accounted(shell, job) or found or JobState("")


def _from_squeue(text: str) -> JobState | None:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    line = lines[0]
    restarts = line[32:40].strip()
    return JobState(
        line[:32].strip(),
        line[296:].strip(),
        line[40:296].strip(),
        restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _accounted(shell: Shell, job: str) -> JobState | None:
    """Returns the state from sacct; None if there is no accounting, or the job is not in it yet."""
    try:
        out = shell.run(
            f"sacct --allocations --noheader --parsable2 --jobs={job} --format=State,ExitCode,NodeList,Reason"
        )
    except ShellFailed:  # "Slurm accounting storage is disabled", or no sacct
        return None
    lines = [line for line in out.decode().splitlines() if line.strip()]
    if not lines:
        return None
    state, code, nodes, reason = (*lines[-1].split("|"), "", "", "")[:4]
    number, _, signal = code.partition(":")
    value = int(number or 0) or (128 + int(signal) if signal.isdecimal() and int(signal) else 0)
    return JobState(state.split()[0], reason, nodes, value)
