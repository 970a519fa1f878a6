"""Jobs on other machines: what is sent there, how a target starts it, and the records by which it is found again.

A target is a folder or a file of this room, and a line of `stoker.cluster.target.MODULES`.
"""
