"""The shell script that a host runs around `stoker node`, and the commands that start, check and stop it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from stoker.cluster.environment import ENVIRONMENT
from stoker.cluster.sent_files import CODE
from stoker.cluster.shell import python_word
from stoker.cluster.submission import Submission
from stoker.job.targets.shared_keys import TargetKeys

START = "start.sh"


def start_script(submission: Submission, keys: TargetKeys, rendezvous: Sequence[str]) -> str:
    """Returns the script that runs a supervisor on a host in a separate process group, and records its exit code."""
    words = submission.node_words(rendezvous)
    code = [f'export PYTHONPATH="$PWD/{CODE}${{PYTHONPATH:+:$PYTHONPATH}}"'] if submission.sends_code else []
    return "\n".join(
        [
            "#!/bin/sh",
            f"# {submission.label}: one supervisor on this host.",
            f"# usage: {START} NAME ADDRESS [DEVICES [--spare]]",
            'cd "$(dirname "$0")" || exit 1',
            "begun=$(cut -d' ' -f22 /proc/$$/stat 2>/dev/null)",
            'echo "$$ $$ $begun" > "$1.pids"',
            f". ./{ENVIRONMENT}",
            *code,
            *keys.setup,
            '[ -z "$3" ] || export CUDA_VISIBLE_DEVICES="$3"',
            f'{python_word(keys.python)} {shlex.join(words)} --name "$1" --listen "$2" $4 &',
            "node=$!",
            'echo "$$ $node $begun" > "$1.pids"',
            "trap 'kill -TERM $node' TERM",
            "wait $node; code=$?",
            "while kill -0 $node 2>/dev/null; do wait $node; code=$?; done",
            'echo "$code" > "$1.exit"',
            "",
        ]
    )


def launch_line(home: str, name: str, address: str, slots: str, *, spare: bool = False, again: bool = False) -> str:
    """Returns the command that runs the script in the background, detached, and waits until it has begun.

    Where it does not begin, the command prints the last line of its log.

    Args:
        home: the run's folder, in shell syntax.
        spare: whether the node waits until another is lost.
        again: whether its log is appended to.
    """
    words = shlex.join([name, address, slots, *(["--spare"] if spare else [])])
    pids, log = shlex.quote(f"{name}.pids"), shlex.quote(f"logs/{name}.log")
    return (
        f"cd {home} && mkdir -p logs && rm -f {pids} {shlex.quote(f'{name}.exit')} && "
        f"{{ setsid sh ./{START} {words} {'>>' if again else '>'}{log} 2>&1 </dev/null & }} && "
        f"s=$! && n=0 && while [ ! -s {pids} ] && kill -0 $s 2>/dev/null && [ $n -lt 100 ]; "
        f"do sleep 0.1; n=$((n+1)); done; "
        f"[ -s {pids} ] || {{ kill $s 2>/dev/null; tail -n 1 {log} >&2; exit 1; }}"
    )


def state_script(home: str, name: str) -> str:
    """Prints ``running``, ``ended CODE``, or ``gone`` where the process is no more and has left no exit code."""
    pids, ended = shlex.quote(f"{name}.pids"), shlex.quote(f"{name}.exit")
    return (
        f"cd {home} 2>/dev/null || {{ echo gone; exit 0; }}; "
        f'if [ -s {ended} ]; then echo "ended $(cat {ended})"; exit 0; fi; '
        f"{_alive(pids)} && echo running || echo gone"
    )


def stop_script(home: str, name: str, seconds: float) -> str:
    """Returns a script that asks the supervisor to save and end; after ``seconds`` it kills the process group."""
    pids, ended = shlex.quote(f"{name}.pids"), shlex.quote(f"{name}.exit")
    return (
        f"cd {home} 2>/dev/null || exit 0; {_alive(pids)} || exit 0; "
        f"[ -s {ended} ] || kill -TERM $node 2>/dev/null; n=0; "
        f"while [ $n -lt {int(seconds * 2)} ] && [ ! -s {ended} ] && kill -0 $group 2>/dev/null; "
        "do sleep 0.5; n=$((n+1)); done; "
        f"kill -s KILL -- -$group 2>/dev/null; [ -s {ended} ] || echo 137 > {ended}"
    )


def _alive(pids: str) -> str:
    """Returns a shell test of whether the script still runs: its process exists, and has the recorded start time."""
    began = "\"$(cut -d' ' -f22 /proc/$group/stat 2>/dev/null)\""
    return (
        f'{{ read -r group node begun < {pids}; }} 2>/dev/null && kill -0 $group 2>/dev/null && [ {began} = "$begun" ]'
    )
