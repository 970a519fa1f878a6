"""Supervisors of several nodes: their channel, who leads, and what each node does as the leader says."""
