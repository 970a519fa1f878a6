"""Checks for keys of a job that exclude each other."""
