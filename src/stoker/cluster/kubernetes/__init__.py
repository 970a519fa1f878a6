"""Kubernetes: manifests from a submission by pure functions, and the calls that create, watch and delete them.

Manifests are JSON objects of the API: `stoker.cluster.kubernetes.manifests` lists them in order of creation.
"""
