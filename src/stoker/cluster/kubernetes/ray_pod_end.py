"""The ``preStop`` hook of a RayJob's pods: the run saves before Kubernetes ends Ray.

``python -m stoker.cluster.kubernetes.ray_pod_end``

When KubeRay suspends or deletes a Ray cluster, all of its pods get SIGTERM, which ends Ray, and with it the run, at
once. Kubernetes sends the signal after this hook has ended. In the head's pod it asks the driver to stop, which has all
supervisors save; in the pods of the nodes it waits for the supervisor. A node's pod that is evicted alone is waited for
until its grace period is over, while the run continues; then Ray replaces the node.
"""

from __future__ import annotations

import psutil

DRIVER = ["-m", "stoker.cluster.ray.driver"]
NODE = ["-m", "stoker", "node"]


def main() -> None:
    """Asks this pod's driver to stop; returns when it and the supervisors have ended."""
    drivers, nodes = _running(DRIVER), _running(NODE)
    for process in drivers:
        process.terminate()
    psutil.wait_procs([*drivers, *nodes])


def _running(words: list[str]) -> list[psutil.Process]:
    """Returns the processes whose interpreter was started with these words."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if (process.info["cmdline"] or [])[1 : 1 + len(words)] == words]


if __name__ == "__main__":
    main()
