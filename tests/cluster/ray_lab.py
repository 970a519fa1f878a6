"""A Ray cluster of a head and three nodes on this machine: ``python ray_lab.py PORT``; commands come line by line."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

from ray.cluster_utils import Cluster

STORE = 80 * 2**20  # bytes of each node's object store


def main() -> None:
    """Starts it, and removes the node that has most of the processes on the line ``remove``."""
    # By default Ray starts workers with a niceness of 15, and other tests take their processor time.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's own spelling
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": int(sys.argv[1]), "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    # Each Ray node deletes the working directory of a job and unpacks it again, so no two may share it.
    folders = [tempfile.mkdtemp(prefix="ray-") for _ in range(3)]
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=STORE, temp_dir=folder) for folder in folders]
    print("up", flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            from ray.util.state import list_actors

            address = f"http://127.0.0.1:{sys.argv[1]}"  # over HTTP: a process that has joined cannot remove its node
            removable = {node.node_id: node for node in nodes}  # Ray's own supervisor of the job is on the head
            busy = [
                removable[actor.node_id]
                for actor in list_actors(address=address)
                if actor.state == "ALIVE" and "Supervisor" in actor.class_name and actor.node_id in removable
            ]
            cluster.remove_node(busy[-1], allow_graceful=False)
            print("removed", flush=True)
    cluster.shutdown()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
