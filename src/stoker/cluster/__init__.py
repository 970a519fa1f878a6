"""Jobs on other machines: the files that are sent, the targets that start a job, and the records to find it again.

A target is a folder or a file of this room, and a line of `stoker.cluster.target.MODULES`.
"""
