"""The node cache: objects at URLs, stored on this machine's disk, downloaded once for all processes."""
