"""Ray clusters: the job that Ray runs, which places one supervisor on each node. Needs the extra `ray`."""
