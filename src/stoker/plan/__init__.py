"""What a layout costs before it runs: closed forms over plain numbers, without a model or a process."""
