"""The models that a server has opened, and the adapters over them. `served.py` finds one by its name."""
