"""Memory and time of a layout before it runs: closed forms over plain numbers, without a model or a process."""
