"""Parses a cluster from YAML, or from a short form such as ``4x8xH100``, ``aws-p5``, ``local``."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from stoker.errors import Problem, UserError
from stoker.hardware.machines.cluster import Cluster, cluster_of, failures_of
from stoker.hardware.machines.detect_machine import corrected, this_machine, this_processor
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.machines.network import Network, parse_network
from stoker.hardware.machines.nodes import NODE_TYPES, node_type
from stoker.job.block import Block, PositiveInt
from stoker.job.document.text_file import read_text
from stoker.job.document.yaml_document import JobDocument, parse_document
from stoker.job.keys.annotations import describe
from stoker.job.keys.schema_errors import shown_value

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
_SUFFIXES = (".yaml", ".yml")
_COUNTED = re.compile(r"\s*(\d+)\s*[x×*]\s*(?:(\d+)\s*[x×*]\s*)?(.+)", re.S)


class ClusterBlock(Block):
    """A cluster as the user writes it."""

    device: str | None = Field(default=None, description="a device of the catalogue, such as H100")
    like: str | None = Field(default=None, description="a type of node, such as aws-p5, for all that is not given")
    name: str | None = Field(default=None, description="what to call it")
    per_node: PositiveInt | None = Field(default=None, description="devices that the fast link joins")
    nodes: PositiveInt = Field(default=1, description="how many nodes")
    network: str | Positive | None = Field(
        default=None, description="of a node: `8 x 400 Gb/s`, or GB/s in one direction"
    )
    rails: PositiveInt | None = Field(default=None, description="ports that share the network")
    network_latency_s: Positive | None = Field(default=None, description="seconds of one step of a ring")
    link_latency_s: Positive | None = Field(default=None, description="the same inside of a node")
    link_gbs: Positive | None = Field(default=None, description="GB/s one way between the devices of a node")
    memory_gib: Positive | None = Field(default=None, description="GiB of a device")
    host_memory_gib: Positive | None = Field(default=None, description="GiB of a node's host")
    host_cores: PositiveInt | None = Field(default=None, description="cores of a node's host")
    price: NotNegative | None = Field(default=None, description="of a node and hour")
    currency: str = Field(default="USD", description="of the price")
    availability: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="chance that a device goes through a month without a failure"
    )
    failures_per_gpu_hour: NotNegative | None = Field(default=None, description="the same as a rate")
    recovery_s: NotNegative | None = Field(default=None, description="seconds from a failure to training")
    storage_gbs: Positive | None = Field(default=None, description="GB/s that each node writes checkpoints with")


# Other programs' names, or common synonyms, of keys.
ALIASES = {
    "gpu": "device", "gpu_type": "device", "accelerator": "device", "preset": "like", "instance": "like",
    "node_type": "like", "gpus_per_node": "per_node", "devices_per_node": "per_node", "num_nodes": "nodes",
    "bandwidth": "network", "interconnect": "network", "network_gbs": "network", "nvlink": "link_gbs",
    "price_per_hour": "price", "cost": "price", "nics": "rails", "memory": "memory_gib",
    "failure_rate": "failures_per_gpu_hour", "uptime": "availability",
}  # fmt: skip


def load_cluster(text: str | Path) -> Cluster:
    """Returns a cluster from a YAML file's path, YAML text, or a short form, with corrections from finished runs.

    Short forms: ``H100`` (one), ``8xH100``, ``64xH100`` (nodes of eight), ``4x8xA100-80GB`` (nodes x devices), a type
    of node (``aws-p5``, ``4x dgx-h100``), ``local`` (this machine), ``cpu`` (this machine's processor).

    Raises:
        UserError: with every problem's place; the nearest names where one is unknown.
    """
    return corrected(_read_cluster(text))


def _read_cluster(text: str | Path) -> Cluster:
    path = Path(text)
    text = str(text)
    if path.suffix.lower() in _SUFFIXES and "\n" not in text and "{" not in text:
        if not path.is_file():
            raise UserError(Problem("there is no such file", "name a cluster's file, or write `8xH100`", file=text))
        return _from_document(parse_document(read_text(path), file=text))
    if "\n" in text or text.lstrip().startswith("{") or re.match(r"\s*\w+:\s", text):
        return _from_document(parse_document(text, file="cluster"))
    return _from_short_form(text)


def _from_short_form(text: str) -> Cluster:
    counted = _COUNTED.fullmatch(text)
    what = (counted[3] if counted else text).strip()
    first = int(counted[1]) if counted else None
    second = int(counted[2]) if counted and counted[2] else None
    if first == 0 or second == 0:
        raise UserError(Problem(f"`{text}` has no devices", "write a number above 0"))
    if what.lower() == "local" and first is None:
        return this_machine()
    if what.lower() == "cpu":
        return this_processor((first or 1) * (second or 1))
    node = node_type(re.sub(r"[\s_]+", "-", what.lower()))
    if node is not None:
        return cluster_of(device_kind(node.device), nodes=first, per_node=second, like=node)
    try:
        device = device_kind(what)
    except UserError as error:
        near = difflib.get_close_matches(what.lower(), [node.name for node in NODE_TYPES], n=2, cutoff=0.75)
        if near or what.endswith("/") or Path(what).exists():
            hint = f"write {' or '.join(near)}" if near else "a cluster's file ends in .yaml"
            raise UserError(Problem(f"`{what}` is not a cluster", hint)) from error
        raise
    if second is not None:
        return replace(cluster_of(device, nodes=first, per_node=second), name=text)
    return replace(cluster_of(device, gpus=first or 1), name=text)


def _from_document(document: JobDocument) -> Cluster:
    if not isinstance(document.data, dict):
        problem = Problem("a cluster is written as keys", "write `device: H100`", file=document.file, line=1, column=1)
        raise UserError(problem)
    try:
        block = ClusterBlock.model_validate(document.data)
    except ValidationError as error:
        raise UserError(*_problems(error, document)) from error
    if (block.device is None) == (block.like is None):
        both = "`device` and `like` are both given" if block.device else "neither `device` nor `like` is given"
        raise UserError(document.problem(("like",), both, "write `device: H100`, or `like: aws-p5`"))
    if block.availability is not None and block.failures_per_gpu_hour is not None:
        message = "`availability` and `failures_per_gpu_hour` say the same"
        raise UserError(document.problem(("failures_per_gpu_hour",), message, "keep one of them"))
    return _cluster(block, document)


def _cluster(block: ClusterBlock, document: JobDocument) -> Cluster:
    like = None
    if block.like is not None:
        like = node_type(block.like.lower())
        if like is None:
            names = [node.name for node in NODE_TYPES]
            near = difflib.get_close_matches(block.like.lower(), names, n=2, cutoff=0.5) or names
            message = f"`{block.like}` is not a type of node"
            raise UserError(document.problem(("like",), message, f"write {' or '.join(near)}"))
    try:
        device = device_kind(block.device or (like.device if like else ""))
    except UserError as error:
        raise UserError(*(document.problem(("device",), p.message, p.suggestion) for p in error.problems)) from error
    device = replace(device, **_given(block, "memory_gib", "link_gbs"))
    network: Network | None = None
    if isinstance(block.network, str):
        network = parse_network(block.network, device, per_node=block.per_node or (like.per_node if like else 8))
        if network is None:
            message = f"`network: {block.network}` does not contain a rate"
            raise UserError(document.problem(("network",), message, "write it as `8 x 400 Gb/s` or `25 GB/s`"))
    elif block.network is not None:
        network = Network(float(block.network), block.rails or 1)
    cluster = cluster_of(device, nodes=block.nodes, per_node=block.per_node, network=network, like=like)
    given = _given(
        block, "rails", "network_latency_s", "link_latency_s", "host_memory_gib", "host_cores", "currency", "name",
        "failures_per_gpu_hour", "recovery_s", "storage_gbs",
    )  # fmt: skip
    if block.availability is not None:
        given["failures_per_gpu_hour"] = failures_of(block.availability)
    return replace(cluster, price_per_hour=block.price, **given)


def _given(block: ClusterBlock, *names: str) -> dict[str, Any]:
    values = {name: getattr(block, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _problems(error: ValidationError, document: JobDocument) -> list[Problem]:
    """Returns one problem for each key, in the order of the file."""
    found: dict[str, Problem] = {}
    fields = ClusterBlock.model_fields
    for item in error.errors(include_url=False, include_context=False):
        key = str(item["loc"][0])
        if key in found:  # all members of a union raise an error
            continue
        if item["type"] == "extra_forbidden":
            near = ALIASES.get(key.lower()) or next(iter(difflib.get_close_matches(key, fields, n=1)), None)
            hint = f"write `{near}`" if near else f"the keys are {', '.join(fields)}"
            found[key] = document.problem((key,), f"unknown key `{key}`", hint, at_key=True)
        else:
            message = f"`{key}` must be {describe(fields[key])}, not {shown_value(document.data[key])}"
            found[key] = document.problem((key,), message, f"it is {fields[key].description}")
    return sorted(found.values(), key=lambda problem: (problem.line, problem.column))
