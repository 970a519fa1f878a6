"""Supervisors of several nodes: their channel, leader election, and the leader's commands."""
