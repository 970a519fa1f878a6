"""Manifests of a product of settings, against upstream's definitions in strict mode and against files kept here.

Where those definitions are not at hand (see `manifest_schemas`), the kinds of Kubernetes itself are still checked, and
the files, which were valid when they were written, are compared.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_kubelet import expanded
from kubernetes_runs import CLAIMED, FULL, run_of
from manifest_schemas import FOLDER, problems_of
from ruamel.yaml import YAML

from stoker.cluster.kubernetes import ray_pod_end
from stoker.cluster.kubernetes.block_problems import block_problems
from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.config_map import config_maps
from stoker.cluster.kubernetes.manifests import manifests, preview, workload
from stoker.cluster.kubernetes.node_script import node_script
from stoker.cluster.kubernetes.submitted import run_of_config_maps

KINDS = ("job", "jobset", "volcano", "trainjob", "rayjob")
GANGS = ("none", "volcano", "kueue", "coscheduling", "koordinator", "yunikorn", "native")
QUEUED = ("volcano", "kueue", "koordinator", "yunikorn")
EXPECTED = Path(__file__).parent / "manifests"
SHARED: dict[str, Any] = {"volumes": [{"claim": "runs", "at": "/work"}]}
MIG = {"cpu": 8, "memory": "64Gi", "gpu": "nvidia.com/mig-3g.40gb"}
KOORDINATOR = {"cpu": 32, "memory": "256Gi", "rdma": {"resource": "koordinator.sh/rdma"}, "alignment": "pcie"}
SHOWN: dict[str, dict[str, Any]] = {
    "job": {},
    "job-roce-native": {**FULL, "gang": "native", "time_limit": 86400},
    "job-pcie-claims": CLAIMED,
    "job-koordinator": {"gang": "koordinator", "queue": "research", **KOORDINATOR},
    "job-yunikorn": {"gang": "yunikorn", "queue": "root.research", **MIG},
    "jobset-kueue": {"kind": "jobset", "gang": "kueue", "queue": "research", "topology": "cloud.example.com/block"},
    "volcano": {"kind": "volcano", "queue": "research", "mpi": True},
    "rayjob-volcano": {"kind": "rayjob", "gang": "volcano", "queue": "research", "ray_version": "2.52.0"},
    "trainjob-coscheduling": {"kind": "trainjob", "gang": "coscheduling"},
}
BUILT_IN = ("v1", "batch/v1", "resource.k8s.io/v1", "scheduling.k8s.io/v1beta1")


def combinations() -> Iterator[tuple[str, str]]:
    """Every kind with every gang that it can have."""
    for kind, gang in itertools.product(KINDS, GANGS):
        if kind != "volcano" or gang == "volcano":
            yield kind, gang


def product() -> Iterator[ClusterRun]:
    """Runs of every combination, with few and with all keys, without devices, with claimed ones, with fewer nodes."""
    for kind, gang in combinations():
        own: dict[str, Any] = {"kind": kind, "gang": gang}
        if gang in QUEUED:
            own["queue"] = "research"
        if gang == "volcano":
            own |= {"topology_tier": 1, "alignment": "numa"}
        if gang == "kueue":
            own["workload_priority"] = "urgent"
        if kind != "volcano":
            own["time_limit"] = 86400
        yield run_of(**{key: own[key] for key in ("kind", "gang", "queue") if key in own})
        rayjob = {"setup": [], "ttl": None}
        mpi = {"mpi": True, "ssh_secret": "keys"} if kind != "rayjob" else {**rayjob, "ray_version": "2.52.0"}
        yield run_of(**(FULL | own | mpi), archive=b"archive")
        plain = rayjob if kind == "rayjob" else {}
        yield run_of(**(FULL | own | CLAIMED | plain), nodes=4, least=2)
        fluid = {"mounts": [{"url": "juicefs:///x"}], "runtime": "juicefs", "preload": False}
        yield run_of(
            **own, fluid=fluid, gpu="none", topology="example.com/rack", topology_mode="required", shared_memory="none"
        )


def test_every_manifest_is_valid_in_strict_mode() -> None:
    checked = set()
    for run in product():
        assert block_problems(run.block) == []
        for manifest in manifests(run, secret="00" * 32):
            if manifest["apiVersion"] == "v1" and run.gang not in ("none", "volcano"):
                continue  # no gang changes it
            if manifest["apiVersion"] in BUILT_IN or FOLDER.is_dir():
                checked.add((manifest["apiVersion"], manifest["kind"]))
                assert problems_of(manifest) == [], (run.kind, run.gang, manifest["kind"])
    assert {("v1", "ConfigMap"), ("v1", "Secret"), ("v1", "Service"), ("batch/v1", "Job")} <= checked
    assert {("resource.k8s.io/v1", "ResourceClaimTemplate"), ("scheduling.k8s.io/v1beta1", "PodGroup")} <= checked
    if FOLDER.is_dir():
        assert len(checked) == 18


def test_the_check_sees_planted_mistakes() -> None:
    def spoilt(kind: str, *path: str | int, **keys: Any) -> list[str]:
        manifest = json.loads(json.dumps(workload(run_of(kind=kind))))
        place = manifest
        for part in path:
            place = place[part]
        place.update(keys)
        return problems_of(manifest)

    assert spoilt("job", "spec", minAvailble=2)
    assert spoilt("job", "spec", "template", "spec", "containers", 0, resource={})
    if FOLDER.is_dir():
        assert spoilt("volcano", "spec", minAvailble=2)
        assert spoilt("jobset", "spec", "replicatedJobs", 0, replicas="1")
        assert spoilt("trainjob", "spec", "trainer", nodes=2)


@pytest.mark.parametrize("name", SHOWN)
def test_manifests_are_those_of_the_files(name: str) -> None:
    text = preview(run_of(**(SHARED | SHOWN[name])))
    file = EXPECTED / f"{name}.yaml"
    if "STOKER_WRITE_EXPECTED" in os.environ:  # after a change that is meant; then read the difference
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_yaml_is_read_back_as_what_is_sent() -> None:
    for run in itertools.islice(product(), 0, None, 7):
        text = preview(run)
        read = list(YAML(typ="safe", pure=True).load_all(text))
        sent = manifests(run, secret=None)
        assert read == json.loads(json.dumps(sent))
        assert "null" not in text.split()


def test_no_secret_is_in_a_manifest() -> None:
    run = run_of(**FULL)
    assert all("stringData" not in manifest for manifest in manifests(run, secret=None))
    sent = json.dumps([m for m in manifests(run, secret="5ec7e7") if m["kind"] != "Secret"])
    assert "5ec7e7" not in sent


def test_a_pod_is_retried_by_exit_code() -> None:
    spec = workload(run_of(retries=4))["spec"]
    (fail, ignore, again) = spec["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert fail["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert (ignore["action"], ignore["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (again["action"], again["onExitCodes"]["values"]) == ("Ignore", [143])
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (4, 0)


@pytest.mark.parametrize(
    ("retries", "requeue", "most", "actions"),
    [
        (4, 143, 5, {2: "TerminateJob", 3: "TerminateJob", 143: "RestartPod", "PodFailed": "RestartPod"}),
        (0, 143, 2**31 - 1, {2: "TerminateJob", 3: "TerminateJob", 143: "RestartPod", "PodFailed": "TerminateJob"}),
        (4, 2, 5, {3: "TerminateJob", 2: "RestartPod", "PodFailed": "RestartPod"}),
    ],
)
def test_volcano_counts_every_restart(retries: int, requeue: int, most: int, actions: dict[int | str, str]) -> None:
    spec = workload(replace(run_of(kind="volcano", retries=retries), requeue=requeue))["spec"]
    written = {p.get("exitCode", p.get("event")): p["action"] for p in spec["tasks"][0]["policies"]}
    assert written == {**actions, "PodEvicted": "RestartPod"} and [*written][-1] == "PodFailed"
    assert spec["maxRetry"] == most


def test_a_rayjob_saves_before_ray_ends_and_then_frees_its_devices() -> None:
    spec = workload(run_of(kind="rayjob", python="/opt/python"))["spec"]
    assert spec["shutdownAfterJobFinishes"] and "ttlSecondsAfterFinished" not in spec
    groups = (spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"])
    for pod in (group["template"]["spec"] for group in groups):
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook == ["/opt/python", "-m", ray_pod_end.__name__] and pod["terminationGracePeriodSeconds"] == 90


@pytest.mark.parametrize("kind", ["job", "rayjob"])
def test_yunikorn_reserves_places_that_the_affinity_selects(kind: str) -> None:
    text = json.dumps(workload(run_of(kind=kind, gang="yunikorn", topology="a/b", topology_mode="required")))
    groups = json.loads(json.loads(re.search(r'task-groups": ("(?:[^"\\]|\\.)*")', text)[1]))  # type: ignore[index]
    for group in groups:
        (term,) = group["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"]["matchLabels"].items() <= group["labels"].items()


def test_dollar_signs_arrive_as_they_are() -> None:
    values = ("$(POD_NAME)", "$$", "a$$(x)$", "$$$(x) $x ${y}", "$$$x", "$")
    run = run_of(environment={f"A{i}": value for i, value in enumerate(values)}, setup=["kill $$", "x=$(date)"])
    container = workload(run)["spec"]["template"]["spec"]["containers"][0]
    given = [variable["value"] for variable in container["env"] if variable["name"].startswith("A")]
    known = {"POD_NAME": "tiny-0", "x": "?", "date": "?"}
    assert [expanded(value, known) for value in given] == [*values]
    assert expanded(container["args"][0], known) == node_script(run) and ' "$POD_IP"' in container["args"][0]


def test_each_device_is_paired_with_a_card_of_its_pcie_root() -> None:
    (template,) = (m for m in manifests(run_of(**CLAIMED), secret=None) if m["kind"] == "ResourceClaimTemplate")
    devices = template["spec"]["spec"]["devices"]
    assert [request["name"] for request in devices["requests"]] == ["device-0", "card-0", "device-1", "card-1"]
    assert [constraint["requests"] for constraint in devices["constraints"]] == [
        ["device-0", "card-0"],
        ["device-1", "card-1"],
    ]
    assert {constraint["matchAttribute"] for constraint in devices["constraints"]} == {
        "resource.kubernetes.io/pcieRoot"
    }


@pytest.mark.parametrize(("kind", "gang"), combinations())
def test_a_gang_starts_with_as_few_nodes_as_the_run_goes_on_with(kind: str, gang: str) -> None:
    queue = {"queue": "research"} if gang in QUEUED else {}
    made = manifests(run_of(kind=kind, gang=gang, nodes=4, least=3, **queue), secret=None)
    text = json.dumps(made)
    groups = [m["spec"] for m in made if m["kind"] == "PodGroup"]
    if gang == "native":
        assert groups == [{"schedulingPolicy": {"gang": {"minCount": 3 + (kind == "rayjob")}}}]
    elif kind == "volcano":
        assert made[-1]["spec"]["minAvailable"] == 3
    elif gang in ("volcano", "coscheduling", "koordinator") and kind != "trainjob":
        assert groups[0]["minMember"] == 3 + (kind == "rayjob")  # a RayJob has a head beside its nodes
        assert kind == "rayjob" or groups[0]["minResources"] == {"nvidia.com/gpu": 6}
    elif gang == "koordinator":
        assert groups[0]["minMember"] == 3
    elif gang == "yunikorn":
        assert '\\"minMember\\": 3' in text
    assert ('\\"3:4\\"' if kind == "rayjob" else "--nodes 3:4") in text


@pytest.mark.parametrize("size", [0, 250, 2_500_000])
def test_a_run_is_found_again_by_its_config_maps(size: int) -> None:
    run = run_of(**FULL, gang="volcano", queue="research", archive=bytes(range(250)) * (size // 250) or None)
    again = run_of_config_maps(*config_maps(run))
    assert again is not None
    assert not any(map(problems_of, manifests(run, secret="00" * 32)[: len(config_maps(run))]))
    assert manifests(again, secret="x") == manifests(run, secret="x")


def fluid(**keys: Any) -> dict[str, Any]:
    return {"fluid": {"mounts": [{"url": "s3://b", **keys}], "preload": False}}


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"kind": "volcano", "gang": "kueue", "queue": "q"}, "gang", "scheduled by Volcano"),
        ({"gang": "kueue"}, "gang", "none is named"),
        ({"gang": "native", "queue": "q"}, "queue", "no meaning"),
        ({"topology_tier": 1}, "topology_tier", "hypernodes"),
        ({"kind": "volcano", "time_limit": 5}, "time_limit", "no limit"),
        ({"alignment": "pcie"}, "alignment", "no `rdma`"),
        ({"kind": "rayjob", "ttl": 60}, "ttl", "keep the GPUs"),
        ({"alignment": "pcie", "rdma": {}}, "alignment", "PCIe root"),
        ({"environment": {"HF_TOKEN": "hf_x"}}, "environment.HF_TOKEN", "could be read"),
        ({"environment": {"MY_PASS": "x"}}, "environment.MY_PASS", "could be read"),
        ({"environment": {"PROXY": "http://me:pw@host:3128"}}, "environment.PROXY", "could be read"),
        ({"environment": {"A": "x"}, "secrets": {"A": "hub/token"}}, "environment.A", "also in `secrets`"),
        (fluid(options={"fs.s3a.secretKey": "x"}), "fluid.mounts[0].options", "could be read"),
        (fluid(url="s3://me:pw@bucket"), "fluid.mounts[0].url", "could be read"),
        (fluid(url="bucket"), "fluid.mounts[0].url", "not a URL"),
        (
            {"fluid": {"mounts": [{"url": "s3://a"}, {"url": "s3://b"}], "preload": False}},
            "fluid.mounts[1].name",
            "two",
        ),
        ({"labels": {"app.kubernetes.io/instance": "x"}}, "labels", "set by Stoker"),
        ({"annotations": {"stoker/fingerprint": "x"}}, "annotations", "set by Stoker"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "a"}, "gang": "kueue", "queue": "b"}, "labels", "from `queue`"),
        ({"gang": "volcano", "queue": "Q q"}, "queue", "not the name of a queue"),
        ({"gang": "yunikorn", "queue": "Q q"}, "queue", "not the name of a queue"),
        ({"cpu": "0"}, "cpu", "is nothing"),
        ({"memory": "0.0Gi"}, "memory", "is nothing"),
        ({"cpu": 4, "resources": {"cpu": 8}}, "resources.cpu", "also given"),
        ({"memory": "4Gi", "resources": {"memory": "8Gi"}}, "resources.memory", "also given"),
        ({"resources": {"nvidia.com/gpu": 8}}, "resources.nvidia.com/gpu", "each process gets one"),
        ({"gpu": "amd.com/gpu", "device_class": "gpu.nvidia.com"}, "gpu", "instead of `gpu`"),
        ({"image": "a b"}, "image", "has a space"),
        ({"interface": "eth0 eth1"}, "interface", "has a space"),
        ({"namespace": "a.b"}, "namespace", "not the name of a namespace"),
        *(
            ({"volumes": [{"at": at, "claim": "a"}]}, "volumes[0].at", "mounted twice")
            for at in ("/stoker", "/dev/shm/")
        ),
        ({"volumes": [{"at": "/etc/stoker//job", "claim": "a"}]}, "volumes[0].at", "mounted twice"),
        ({"volumes": [{"at": "/etc/stoker/job/x", "claim": "a"}]}, "volumes[0].at", "read-only"),
        ({"volumes": [{"at": "/", "claim": "a"}]}, "volumes[0].at", "hide the image"),
        ({"volumes": [{"at": "/a/../b", "claim": "a"}]}, "volumes[0].at", "has `..`"),
        ({"volumes": [{"at": "/a", "claim": "a", "sub_path": "../b"}]}, "volumes[0].sub_path", "not a folder"),
        ({"volumes": [{"at": "/a"}]}, "volumes[0]", "none of"),
        ({"volumes": [{"at": "/a", "claim": "a", "secret": "b"}]}, "volumes[0]", "claim and secret"),
        ({"volumes": [{"at": "/a", "claim": "a"}, {"at": "/a/", "claim": "b"}]}, "volumes[1].at", "twice"),
        ({"fluid": {"mounts": [{"url": "s3://b"}]}}, "fluid.preload", "namespace"),
        ({"tolerations": [{"key": "a", "seconds": 3}]}, "tolerations[0].seconds", "NoExecute"),
    ],
)
def test_settings_that_do_not_fit_each_other(keys: dict[str, Any], key: str, message: str) -> None:
    ((where, what, hint),) = block_problems(run_of(**keys).block)
    assert where == key and message in what and hint


def test_names_that_only_look_like_secrets_are_accepted() -> None:
    names = ("MONKEY", "KEYBOARD", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PASSES", "PYTHONPATH")
    block = run_of(environment={**dict.fromkeys(names, "x"), "URL": "http://host:80/a:b@c"}).block
    assert block_problems(block) == []
