"""The script of a pod's container: runs `stoker node` by `stoker.cluster.kubernetes.pod`, beside the sent files."""

from __future__ import annotations

import shlex

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.sent_archive import ARCHIVE, parts_of
from stoker.cluster.sent_files import ARCHIVE as CODE_ARCHIVE
from stoker.cluster.sent_files import CODE
from stoker.cluster.submission import nodes_option

WORK = "/stoker"  # an empty folder of the pod, into which the archive is unpacked
GIVEN = "/etc/stoker/job"  # the config map
JOB, RECORD = "job.yaml", "submission.json"
HOSTFILE, DRIVER = "hostfile", "driver.json"  # for MPI, and for a RayJob's driver
SECRET_FOLDER, SECRET_KEY = "/etc/stoker/secret", "channel"
# `stoker node` requires a key file that only its owner can read. Files of a secret's volume belong to root, and the
# image's user is unknown; so the container makes a copy in memory.
OWN_SECRET = "/dev/shm/stoker-channel"
WIDTH = 110  # columns of the script


def node_script(run: ClusterRun) -> str:
    """Returns the shell script of a pod of the run."""
    python = run.block.python
    words = [python, "-m", "stoker.cluster.kubernetes.pod", *run.log_folders]
    words += ["node", f"{GIVEN}/{JOB}", *run.overrides]
    words += ["--rendezvous", ",".join(run.rendezvous()), "--secret", OWN_SECRET]
    words += ["--nodes", nodes_option(run.least, run.nodes), "--devices", f"{run.devices}"]
    options = shlex.join(words) + ' --listen "$POD_IP" --name "$POD_NAME"'
    return setup_lines(run) + wrap_command(f"exec {options}")


def setup_lines(run: ClusterRun) -> str:
    """Returns the script's lines before Stoker starts."""
    lines = ["set -e", f"(umask 077 && cp {SECRET_FOLDER}/{SECRET_KEY} {OWN_SECRET})", f"cd {WORK}"]
    if run.archive is not None:
        lines.append(unpacking(run))
    if run.code:
        lines.append(f'export PYTHONPATH="{WORK}/{CODE}${{PYTHONPATH:+:$PYTHONPATH}}"')
    return "".join(f"{line}\n" for line in [*lines, *run.block.setup])


def unpacking(run: ClusterRun) -> str:
    """Returns the command that unpacks the sent archive into the current folder, and from it Stoker's own code."""
    unpack = f"{shlex.quote(run.block.python)} -W ignore -m tarfile -e"
    sent = f"{unpack} {GIVEN}/{ARCHIVE} ."
    if len(parts_of(run)) > 1:
        sent = f"cat {GIVEN}/{ARCHIVE}.* > {ARCHIVE} && {unpack} {ARCHIVE} ."
    return f"{sent} && {unpack} {CODE_ARCHIVE} {CODE}" if run.code else sent


def wrap_command(command: str) -> str:
    """Returns a command over several lines, broken before options; a long word stays whole."""
    lines, line = [], ""
    for part in command.replace(" --", "\n--").split("\n"):
        if line and len(line) + len(part) + 1 > WIDTH:
            lines.append(line)
            line = f"  {part}"
        else:
            line = f"{line} {part}" if line else part
    return " \\\n".join([*lines, line]) + "\n"
