"""Kubernetes: manifests from a submission by pure functions, and the calls that create, watch and delete them.

Manifests are what the API takes as JSON: `stoker.cluster.kubernetes.manifests` says which, in which order.
"""
