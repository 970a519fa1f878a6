"""Fault rehearsal: a run with injected faults, compared with an undisturbed one."""
