"""The script for sbatch: one supervisor per node, started by srun."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator

from stoker.cluster.environment import ENVIRONMENT
from stoker.cluster.sent_files import CODE
from stoker.cluster.shell import python_word
from stoker.cluster.submission import JOB, SECRET, Submission
from stoker.job.targets.slurm import SlurmBlock
from stoker.resilience.deadline import exit_code

SCRIPT = "submit.sbatch"
ENDED = "exit-code"  # file in the submission's folder: exit code of the job's last start, and `TIME` if that ended it
TIME = "time-limit"
CANCELLED = "143 cancelled"  # there if `stoker stop` has cancelled the job, and its script has not ended
EARLY = 60  # seconds by which Slurm's signal before the time limit may come too early (`sbatch --signal`)
NODE_ENDED = "node-exit-code"  # file there, for each node: exit code of its supervisor
NUMBER = "job-number"  # file there: what sbatch printed
LEFT = 60  # seconds in which all nodes end once one of them has finished or saved the run
STOP = "stop"  # file there: the user has stopped the job, so it is not requeued


def batch_script(submission: Submission, block: SlurmBlock, *, files: str) -> str:
    """Returns the script.

    Args:
        files: the submission's folder, relative to the folder in which sbatch is called.
    """
    return "\n".join(["#!/bin/bash", *_header(submission, block, files), "", *_body(submission, block, files), ""])


def _header(submission: Submission, block: SlurmBlock, files: str) -> Iterator[str]:
    options: list[tuple[str, object]] = [
        ("job-name", submission.name),
        ("comment", f"stoker {submission.fingerprint[:16]}"),
        ("nodes", submission.hosts),
        ("ntasks-per-node", 1),
        ("gres", gres_of(submission, block)),
        ("cpus-per-task", block.cpus),
        ("mem", block.memory),
        ("partition", block.partition),
        ("account", block.account),
        ("qos", block.qos),
        ("reservation", block.reservation),
        ("constraint", block.constraint),
        ("nodelist", block.nodelist),
        ("exclude", block.exclude),
        ("time", block.time),
        ("output", f"{files.replace('%', '%%')}/logs/slurm-%j.log"),  # Slurm replaces %j in a folder's name too
        ("open-mode", "append"),
        ("signal", f"B:TERM@{block.warn}"),
    ]
    for name, value in options:
        if value is not None:
            yield f"#SBATCH --{name}={_word(str(value))}"
    if block.exclusive:
        yield "#SBATCH --exclusive"
    if submission.least < submission.hosts:
        yield "#SBATCH --no-kill"  # the job continues when it loses a node
    yield "#SBATCH --requeue" if block.requeue else "#SBATCH --no-requeue"
    for option in block.sbatch:
        yield f"#SBATCH {option}"


def _body(submission: Submission, block: SlurmBlock, files: str) -> Iterator[str]:
    yield f"# Stoker: {submission.label}. It resumes from its newest checkpoint when it is submitted again."
    yield f"export STOKER_FILES={shlex.quote(files)}"
    yield 'cd "$SLURM_SUBMIT_DIR" || exit 1'
    yield f'. "$STOKER_FILES/{ENVIRONMENT}"'
    if block.container != "none":
        yield 'STOKER_FILES="$(realpath "$STOKER_FILES")"  # its parent is mounted'
    if submission.hosts > 1:
        yield f'rm -f "$STOKER_FILES/{NODE_ENDED}"-*'
    yield ""
    yield "# Where the supervisors meet: any of them may be the first."
    yield 'export STOKER_MEET=""'
    yield 'for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do'
    yield f'    STOKER_MEET="$STOKER_MEET${{STOKER_MEET:+,}}$host:{submission.port}"'
    yield "done"
    yield ""
    yield "# One supervisor on each node. SIGTERM reaches it alone; it has its processes save and end."
    yield f"{srun_line(submission, block)} <<'NODE' &"
    if submission.sends_code:
        yield f'export PYTHONPATH="$(realpath "$STOKER_FILES/{CODE}")${{PYTHONPATH:+:$PYTHONPATH}}"'
    yield from block.setup
    words = submission.node_words(["MEET"], secret="SECRET", job="JOB")
    named = {"MEET": '"$STOKER_MEET"', "SECRET": f'"$STOKER_FILES/{SECRET}"', "JOB": f'"$STOKER_FILES/{JOB}"'}
    node = " ".join(named.get(word, shlex.quote(word)) for word in words)
    spare = ""
    if submission.spares:
        yield f'[ "$SLURM_NODEID" -lt {submission.nodes} ] || spare=--spare  # it waits until another node is lost'
        spare = " $spare"
    yield f'setsid {python_word(block.python)} {node} --name "$SLURMD_NODENAME"{spare} </dev/null &'
    yield "node=$!"
    yield "trap 'kill -TERM $node' TERM"
    yield "wait $node; code=$?"
    yield "while kill -0 $node 2>/dev/null; do wait $node; code=$?; done"
    if submission.hosts > 1:
        yield f'echo $code > "$STOKER_FILES/{NODE_ENDED}-$SLURMD_NODENAME"'
    yield "exit $code"
    yield "NODE"
    yield "run=$!"
    yield ""
    yield from _ending(submission, block)


def _ending(submission: Submission, block: SlurmBlock) -> Iterator[str]:
    requeue_code = exit_code(signal.SIGTERM, submission.loaded.job.faults)
    yield f"# SIGTERM comes {block.warn} s before the end of the time, and from `stoker stop`."
    yield "asked="
    yield "trap 'asked=yes; scancel --signal=TERM \"$SLURM_JOB_ID\"' TERM"
    if submission.hosts > 1:
        ended = f'grep -qsx -e 0 -e {requeue_code} "$STOKER_FILES/{NODE_ENDED}"-*'
        yield f"# srun may wait for a lost node. Once another node has ended the run, it waits for {LEFT} s."
        yield f"(trap '' TERM; until {ended}; do sleep 1; done; sleep {LEFT}; kill -KILL $run) >/dev/null 2>&1 &"
        yield "watch=$!"
        yield "disown $watch  # or bash reports in the log that it was killed"
    yield "wait $run; code=$?"
    yield "while kill -0 $run 2>/dev/null; do wait $run; code=$?; done"
    if submission.hosts > 1:
        yield "kill -KILL $watch"
        yield "# srun returns the highest code. A lost node does not count where others have finished the run."
        yield f'grep -qsx 0 "$STOKER_FILES/{NODE_ENDED}"-* && code=0'
        yield "# Nor does one that was killed where others have saved the run."
        yield f'[ -n "$asked" ] && [ $code -ne 0 ] && grep -qsx {requeue_code} "$STOKER_FILES/{NODE_ENDED}"-* &&'
        yield f"    code={requeue_code}"
    if block.requeue:
        yield ""
        yield f'if [ -n "$asked" ] && [ $code -eq {requeue_code} ] && [ ! -e "$STOKER_FILES/{STOP}" ] &&'
        yield f'    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {block.requeue} ]; then'
        yield '    scontrol requeue "$SLURM_JOB_ID" && exit 0'
        yield "fi"
    yield "# Slurm's end of the job, which older versions do not set; empty if it is unknown."
    yield "end=${SLURM_JOB_END_TIME:-0}"
    yield 'if [ "$end" -le 0 ]; then'
    yield '    end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)'
    yield '    end=$(date --date="${end:-unknown}" +%s 2>/dev/null) || end='
    yield "fi"
    yield f'if [ -n "$asked" ] && [ $code -eq {requeue_code} ] && [ ! -e "$STOKER_FILES/{STOP}" ] &&'
    yield f'    [ -n "$end" ] && [ "$(date +%s)" -ge $((end - {block.warn + EARLY})) ]; then'
    yield f'    code="$code {TIME}"'
    yield "fi"
    yield f'echo $code > "$STOKER_FILES/{ENDED}"'
    yield "exit ${code%% *}"


def srun_line(submission: Submission, block: SlurmBlock) -> str:
    """Returns the srun command, with its container; each node's script is its standard input."""
    words = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--label"]
    if submission.hosts == 1:
        words.remove("--label")
    if submission.least < submission.hosts:
        words.append("--no-kill")
    if block.cpus is not None:
        words.append(f"--cpus-per-task={block.cpus}")  # from Slurm 22.05 on srun does not inherit it
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in block.mounts]
    own = ['"$PWD"', '"${STOKER_FILES%/*}"']  # the latter has the files that are sent, and the code that they link to
    if block.container == "pyxis":
        words += [f"--container-image={block.image}", '--container-workdir="$PWD"']
        listed = ",".join([*(f"{folder}:{folder}" for folder in own), *map(shlex.quote, mounts)])
        words.append(f"--container-mounts={listed}")
        return " ".join([*(word if '"' in word else shlex.quote(word) for word in words), "bash -s"])
    if block.container == "apptainer":
        nv = [] if block.gres == "none" else ["--nv"]
        binds = [f"--bind={','.join(mounts)}"] if mounts else []
        words += ["apptainer", "exec", *nv, *binds, str(block.image)]
        bound = " ".join(f"--bind={folder}" for folder in own)
        return shlex.join(words).replace(" exec ", f' exec --pwd="$PWD" {bound} ', 1) + " bash -s"
    return shlex.join([*words, "bash", "-s"])


def gres_of(submission: Submission, block: SlurmBlock) -> str | None:
    """Returns the resources of each node: ``gpu:8`` for eight processes; None for no request."""
    if block.gres == "none":
        return None
    last = block.gres.rpartition(":")[2]
    return block.gres if last.isdecimal() or "," in block.gres else f"{block.gres}:{submission.devices}"


def _word(text: str) -> str:
    """Formats a value of an #SBATCH line, in double quotes if it contains a space."""
    return f'"{text}"' if " " in text else text
