"""Supervise one node of a multi-node run; start it on every node. For a single node, use `stoker train`."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.output.run_report import answer_of, say_ending
from stoker.cli.preflight import open_job, with_planned_layout
from stoker.cli.train.start_run import printed_ending, take_folder
from stoker.errors import CannotRun, Problem, UserError
from stoker.job import LoadedJob
from stoker.job.layout import layout_of
from stoker.job.load_job import with_nodes
from stoker.job.stages import has_stages

if TYPE_CHECKING:
    from stoker.job.stage import Stage
    from stoker.launch.nodes.channel import Address, PeerNetwork
    from stoker.launch.run_spec import RunSpec
    from stoker.train.run_result import RunResult

NODES = re.compile(r"(\d+)(?::(\d+))?")
NAME = re.compile(r"[\w.-]{1,200}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker node``."""
    parser.add_argument("job", metavar="JOB", help="the job file, the same on every node")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the job to override")
    parser.add_argument(
        "--rendezvous",
        required=True,
        metavar="HOST:PORT[,HOST:PORT ...]",
        help="addresses of the nodes; if all are listed, the run survives the loss of the first node",
    )
    parser.add_argument(
        "--secret",
        required=True,
        metavar="FILE",
        help="secret file, the same on every node, readable only by its owner: at least 32 bytes, raw or hexadecimal",
    )
    parser.add_argument(
        "--nodes",
        metavar="MIN[:MAX]",
        help="number of nodes; overrides faults.nodes (default: the nodes of --rendezvous)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="processes on this node (default: those of the layout divided by the nodes)",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="address to bind to (default: this host's address in --rendezvous)",
    )
    parser.add_argument(
        "--name", default=socket.gethostname(), help="name of the node in messages (default: %(default)s)"
    )
    parser.add_argument("--spare", action="store_true", help="wait as a warm spare until another node is lost")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Takes part in the run; returns the exit code of `stoker train`."""
    from stoker.launch.nodes.addresses import own_address, parsed
    from stoker.runs.shared_secret import read_secret

    if not NAME.fullmatch(arguments.name):
        raise UserError(
            Problem(f"--name {arguments.name!r} is not a valid name", "use letters, digits, `-`, `_` and `.`")
        )
    if Path(arguments.secret).is_dir():
        raise UserError(Problem(f"--secret {arguments.secret} is a folder, not a file", "name the file in it"))
    secret = read_secret(Path(arguments.secret))
    rendezvous = parsed(arguments.rendezvous)
    listen = own_address(rendezvous, arguments.listen)
    meeting = Meeting(rendezvous, listen, secret)
    if has_stages(arguments.job):
        from stoker.cli.train.stages import train_stages

        chosen = argparse.Namespace(**{**vars(arguments), "only": None, "begin": None, "fresh": False})
        alone = len(rendezvous) == 1 and arguments.nodes in (None, "1")
        return train_stages(chosen, None, None if alone else StagesOfNodes(arguments, meeting))
    opened = open_job(arguments.job, arguments.overrides, "train")
    spec, ending = _taken_part(arguments, opened, meeting, lambda: None)
    if arguments.json:
        print(json.dumps(answer_of(spec.output, ending)), flush=True)
    else:
        say_ending(spec, ending, shlex.join(_command(arguments)))
    return ending.exit_code


def _command(arguments: argparse.Namespace) -> list[str]:
    """Returns the command that continues a run on this node."""
    words = ["stoker", "node", arguments.job, *arguments.overrides, "--rendezvous", arguments.rendezvous]
    words += ["--secret", arguments.secret]
    options = {"--nodes": arguments.nodes, "--devices": arguments.devices, "--listen": arguments.listen}
    options["--name"] = None if arguments.name == socket.gethostname() else arguments.name
    words += [word for option, value in options.items() if value is not None for word in (option, str(value))]
    return [*words, *(["--spare"] if arguments.spare else [])]


@dataclass(frozen=True)
class Meeting:
    """The addresses of a rendezvous, and its secret.

    Attributes:
        rendezvous: addresses of the nodes, the first one first.
        listen: address of this node.
        secret: shared by all nodes.
    """

    rendezvous: Sequence[Address]
    listen: Address
    secret: bytes

    def after(self, count: int) -> Meeting:
        """Returns the rendezvous with all ports increased by ``count``; port 0, which takes a free one, stays 0."""
        moved = [(host, port + count) for host, port in self.rendezvous]
        host, port = self.listen
        return replace(self, rendezvous=moved, listen=(host, port + count if port else 0))


class StagesOfNodes:
    """Runs stages on several nodes: each node processes all stages, with a separate rendezvous for each trained one.

    Each stage has its own port, so that nodes at different stages do not connect to each other. The first node of the
    rendezvous writes the files that all nodes read.
    """

    def __init__(self, arguments: argparse.Namespace, meeting: Meeting) -> None:
        self._arguments, self._meeting = arguments, meeting
        self.first = meeting.listen == meeting.rendezvous[0]
        self.alone = len(meeting.rendezvous) == 1
        self.command: Sequence[str] = _command(arguments)

    def train(
        self, stage: Stage, loaded: LoadedJob, begun: Callable[[], None], *, quiet: bool
    ) -> tuple[RunSpec, RunResult]:
        least, most = _nodes(self._arguments, loaded, len(self._meeting.rendezvous))
        if least < most:
            hint = f"write --nodes {most}, and no faults.nodes"
            raise UserError(Problem(f"stage {stage.name}: the stages of a job need all of their nodes", hint))
        return _taken_part(self._arguments, loaded, self._meeting.after(stage.index), begun)


def _taken_part(
    arguments: argparse.Namespace, opened: LoadedJob, meeting: Meeting, begun: Callable[[], None]
) -> tuple[RunSpec, RunResult]:
    """Trains a job as one of its nodes.

    Args:
        begun: called before training, while this node holds the lock of the run's folder.

    Returns:
        The run's spec, and its result.

    Raises:
        Ended: a signal ended the run before it had a result.
    """
    least, most = _nodes(arguments, opened, len(meeting.rendezvous))
    from stoker.launch.nodes.cache_exchange import CacheServer, exchanging
    from stoker.launch.nodes.channel import STRANGERS, PeerNetwork
    from stoker.launch.nodes.group import Node
    from stoker.launch.nodes.place import Place
    from stoker.node_cache.job_urls import urls_of

    listen, secret = meeting.listen, meeting.secret

    def listening() -> PeerNetwork:
        try:
            return PeerNetwork(listen, secret, strangers=max(STRANGERS, 2 * most))
        except OSError as error:
            words = f"node {arguments.name} cannot listen on {listen[0]}:{listen[1]} ({error.strerror})"
            raise CannotRun(
                Problem(words, "stop the process that listens there, or use another port in --rendezvous")
            ) from error

    urls = urls_of(opened.job)
    server = CacheServer(urls)
    if urls:  # the nodes read the data at about the same time, so they serve each other before training
        network = listening()
        with exchanging(network, server, list(meeting.rendezvous), secret):
            prepared = _prepared(arguments, opened, most, here=True)
    else:
        prepared = _prepared(arguments, opened, most, here=False)
        network = listening()
    spec, devices, nccl = prepared
    from stoker.launch.supervisor import train_on_nodes
    from stoker.runs.run_folder import RunFolder

    @contextmanager
    def take() -> Iterator[bool]:
        with take_folder(RunFolder(spec.output)) as is_new:
            begun()
            yield is_new

    node = Node(arguments.name, network.address, tuple(range(devices)), arguments.spare, _digest(spec.loaded))
    place = Place(node, tuple(meeting.rendezvous), least, most, secret)
    with printed_ending(spec):
        return spec, train_on_nodes(spec, place, network, take, server, nccl=nccl)


def _prepared(arguments: argparse.Namespace, opened: LoadedJob, most: int, *, here: bool) -> tuple[RunSpec, int, bool]:
    """Checks the devices and the data of a node.

    Args:
        here: whether data is read in this process, which exchanges objects with other nodes.

    Returns:
        The run's spec, the number of processes on this node, and whether they communicate through NCCL.
    """
    from stoker.cli.output.quiet_libraries import quiet_environment, quiet_libraries
    from stoker.cli.output.tokenise_report import quiet_report
    from stoker.job.task_spec import is_language
    from stoker.launch.forkserver import start_server

    quiet_environment()
    start_server(language=is_language(opened.job))  # it imports the workers' modules, in parallel to this process
    loaded, devices = _laid_out(arguments, opened, most)
    from stoker.launch.run_spec import RunSpec
    from stoker.launch.start_checks import check_node

    quiet_libraries()
    base = Path.cwd()
    spec = RunSpec(loaded, base, base / loaded.job.output, quiet=arguments.json, read=opened.document)
    checked = check_node(spec, devices, quiet_report, here=here)
    return replace(spec, cached=checked.cached), devices, checked.nccl


def _nodes(arguments: argparse.Namespace, opened: LoadedJob, named: int) -> tuple[int, int]:
    """Returns the smallest and the largest number of nodes."""
    if arguments.nodes is not None:
        match = NODES.fullmatch(arguments.nodes)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise UserError(
                Problem(f"--nodes {arguments.nodes}: not of the form MIN or MIN:MAX", "write for example --nodes 2:3")
            )
        return int(match[1]), int(match[2] or match[1])
    if (nodes := opened.job.faults.nodes) is not None:
        return nodes.min, nodes.max
    if named > 1:
        return named, named
    if arguments.devices and not opened.document.planned:
        count = -(-layout_of(opened.job).world // arguments.devices)
        return count, count
    raise UserError(
        Problem("the number of nodes is not given", "write --nodes N, or faults.nodes: {min: N, max: N} in the job")
    )


def _laid_out(arguments: argparse.Namespace, opened: LoadedJob, most: int) -> tuple[LoadedJob, int]:
    """Returns the job with its layout, and this node's number of processes."""
    from stoker.launch.cluster_env import RankInfo

    devices = arguments.devices
    if devices is not None and devices < 1:
        raise UserError(Problem(f"--devices {devices}: a node has at least one", "write --devices 1, or more"))
    if opened.document.planned:
        if devices is None:
            hint = "write --devices N"
            raise UserError(Problem("`parallel: auto` needs to know the devices of a node", hint))
        return with_nodes(with_planned_layout(opened, RankInfo(0, most * devices, 0, devices)), most), devices
    world = layout_of(opened.job).world
    if devices is None:
        devices = -(-world // most)
    nodes = world // devices if world % devices == 0 else 1
    return with_nodes(opened, nodes), devices


def _digest(loaded: LoadedJob) -> str:
    """Returns a digest that is equal on nodes with the same job."""
    values = loaded.job.model_dump(mode="json", exclude={"output": True, "target": True, "faults": {"nodes"}})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
