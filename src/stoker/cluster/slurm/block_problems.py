"""Problems of a Slurm block: keys that do not go together, and values that Slurm would misread."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stoker.cluster.slurm.sbatch_options import option_problem
from stoker.job.targets.slurm import SlurmBlock

Found = tuple[str, str, str]  # (key below the block, problem, suggestion)
TIME = re.compile(r"\d+|\d+:\d{2}(:\d{2})?|\d+-\d+(:\d{2}){0,2}")  # as `sbatch --time` reads it
UNLIMITED = ("UNLIMITED", "INFINITE")
MEMORY = re.compile(r"\d+([KMGT]B?)?", re.I)  # as `sbatch --mem` reads it
GRES = re.compile(r"[A-Za-z_][\w./-]*(:[\w.-]+)*")
LONGEST_WARN = 65535  # seconds (`sbatch --signal`)
MINUTE, HOUR, DAY = 60, 3600, 86400
IN_HEADER = (  # keys whose values are written into #SBATCH lines, which have no escapes
    "folder", "partition", "account", "qos", "reservation", "constraint", "time", "gres", "memory", "nodelist",
    "exclude",
)  # fmt: skip
ONE_LINE = ("python", *IN_HEADER, "image", "mounts", "sbatch", "login")  # keys whose values must not have line breaks


def block_problems(block: SlurmBlock) -> list[Found]:
    """Returns all problems of a block."""
    found = [*_lines(block), *_times(block), *_devices(block)]
    if (block.container == "none") != (block.image is None):
        message = "`container` and `image` go together"
        found.append(("image" if block.image else "container", message, "write both, or neither"))
    elif block.container == "none" and block.mounts:
        message = "`mounts` are those of a container, and there is none"
        found.append(("mounts", message, "remove it, or write `container` and `image`"))
    if block.ssh and block.login is None:
        message = "`ssh` has options for the login node, and there is no `login`"
        found.append(("ssh", message, "remove it, or write `login: me@host`"))
    for index, option in enumerate(block.sbatch):
        if (problem := option_problem(block, option)) is not None:
            found.append((f"sbatch[{index}]", *problem))
    return found


def seconds_of(time: str | int) -> int:
    """Returns the seconds of a time limit: minutes, M:S, H:M:S, or D-H with optional minutes and seconds."""
    days, dash, rest = str(time).rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (HOUR, MINUTE, 1) if dash or len(parts) == 3 else (MINUTE, 1)
    return int(days or 0) * DAY + sum(part * unit for part, unit in zip(parts, units, strict=False))


def gpus_of(gres: str) -> int | None:
    """Returns the number of GPUs that `gres` gives to a node; None if it names no number of them."""
    counts = [item.split(":") for item in gres.split(",")]
    numbers = [int(words[-1]) for words in counts if words[0] == "gpu" and words[-1].isdecimal()]
    return sum(numbers) if numbers else None


def _lines(block: SlurmBlock) -> Iterator[Found]:
    for key in ONE_LINE:
        value = getattr(block, key)
        for index, text in enumerate(value if isinstance(value, list) else [value]):
            place = f"{key}[{index}]" if isinstance(value, list) else key
            if isinstance(text, str) and re.search(r"[\n\r]", text):
                yield place, "the value has several lines, and each would be a line of the script", "write one line"
            elif key in IN_HEADER and isinstance(text, str) and '"' in text:
                yield place, "a quote ends the value in the script", "write it without quotes"
    for index, command in enumerate(block.setup):
        if "NODE" in command.splitlines():
            yield f"setup[{index}]", "a line `NODE` would end the script of a node", "write another command"


def _times(block: SlurmBlock) -> Iterator[Found]:
    if block.warn > LONGEST_WARN:
        yield "warn", f"`warn` is {block.warn} seconds, and Slurm takes at most {LONGEST_WARN}", "write a smaller one"
    if block.time is None or str(block.time).upper() in UNLIMITED:
        return
    if isinstance(block.time, str) and not TIME.fullmatch(block.time):
        hint = 'write minutes, "24:00:00" or 1-12 (days-hours)'
        yield "time", f"`time: {block.time}` is not a time of Slurm", hint
    elif 0 < seconds_of(block.time) <= block.warn:  # 0 is no limit
        message = f"`time: {block.time}` is {seconds_of(block.time)} s, and SIGTERM comes {block.warn} s before its end"
        yield "time", message, f"write a longer time, or a smaller `warn` than {seconds_of(block.time)}"


def _devices(block: SlurmBlock) -> Iterator[Found]:
    if block.memory is not None and not MEMORY.fullmatch(block.memory):
        yield (
            "memory",
            f"`memory: {block.memory}` is not a size of Slurm",
            "write, for example, 500G, or 0 for all of it",
        )
    for item in block.gres.split(",") if block.gres != "none" else ():
        last = item.rpartition(":")[2]
        if not GRES.fullmatch(item):
            yield "gres", f"`{item}` is not a resource of Slurm", "write gpu, gpu:8, gpu:h100:8 or none"
        elif item.startswith("gpu:") and last.isdecimal() and int(last) < 1:
            yield "gres", f"`{item}` has no device", "write at least one, or `gres: none`"
