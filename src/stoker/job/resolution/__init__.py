"""The values of keys that are `auto` or absent, and the reason of each. `resolve.py` is the entry."""
