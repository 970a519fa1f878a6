"""Child processes, signals and threads of a process."""
