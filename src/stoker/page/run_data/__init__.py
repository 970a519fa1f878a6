"""What the page shows of runs, read from their folders: lists, health, curves, stages, reports."""
