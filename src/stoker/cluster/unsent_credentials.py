"""Credentials of stores that are set in this shell, but not sent to the nodes of a job that reads or writes there."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.cluster.environment import variables
from stoker.cluster.submission import Submission
from stoker.job.targets.shared_keys import TargetKeys
from stoker.node_cache.job_urls import urls_of
from stoker.node_cache.urls import EXTRAS, scheme_of

# The variable of a store's key, by the store's extra, and the pattern of all variables of the store.
KEYS = {"s3": ("AWS_ACCESS_KEY_ID", "AWS_*"), "oss": ("OSS_ACCESS_KEY_ID", "OSS_*")}


def unsent_credentials(submission: Submission, keys: TargetKeys, environment: Mapping[str, str]) -> list[str]:
    """Returns a line for each store whose key is set here and not sent: credentials are sent only if `forward` says so.

    Where variables are not for the job's owner only, none are to be sent, and the list is empty. So it is where sbatch
    runs here, as it hands this shell's variables to the nodes.
    """
    if keys.instead_of_private or keys.in_place:
        return []
    sent = variables(keys, environment)
    stores = {EXTRAS.get(scheme_of(url), "") for job in submission.jobs for url in urls_of(job)}
    return [
        f"{name} is not sent to the nodes: add {pattern} to `forward`, unless the nodes have credentials of their own"
        for store, (name, pattern) in KEYS.items()
        if store in stores and environment.get(name) and name not in sent
    ]
