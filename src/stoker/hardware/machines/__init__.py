"""Descriptions of machines and clusters: devices, nodes, networks; written, published or detected."""
