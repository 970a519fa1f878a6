"""The states of a run's supervisors on its hosts, and the state of the run that follows from them.

A host's state is ``running``, ``ended CODE``, ``gone``, or the reason why it could not be asked.
"""

from __future__ import annotations

from stoker.cluster.target import Status


def status_of(states: dict[str, str], requeue: int | None = None) -> Status:
    """Derives the state of a run from its hosts': ``running``, ``ended CODE``, ``gone``, or an error of the query.

    Args:
        requeue: `faults.requeue`: the exit code of a run that was asked to stop, in addition to those of signals.
    """
    running = [host for host, state in states.items() if state == "running"]
    codes = {host: int(state.split()[1]) for host, state in states.items() if state.startswith("ended")}
    bad = [f"{host} ended with exit code {code}" for host, code in codes.items() if code]
    gone = [f"{host} has no supervisor" for host, state in states.items() if state == "gone"]
    unreached = [host for host, why in states.items() if is_unknown(why)]
    why = "; ".join([*bad, *gone, *(f"{host}: {states[host]}" for host in unreached)])
    if running:
        return Status("running", why, running, unreached)
    if not codes:
        return Status("lost", why, (), unreached)
    if any(code == 0 for code in codes.values()):
        return Status("done", why, (), unreached)
    stopped = all(code >= 128 or code == requeue for code in codes.values())
    return Status("stopped" if stopped else "failed", why, (), unreached)


def is_unknown(state: str) -> bool:
    """Returns whether a state is the reason why the host could not be asked."""
    return state not in ("running", "gone") and not state.startswith("ended ")


def may_return(state: str) -> bool:
    """Returns whether a host whose supervisor is in this state can join a run that goes on elsewhere."""
    return state == "gone" or (state.startswith("ended ") and state != "ended 0")
