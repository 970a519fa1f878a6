"""Hosts that OpenSSH reaches."""
