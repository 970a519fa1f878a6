"""Examples that ship with Stoker, to be named by import path in a job of ``task: module``."""
