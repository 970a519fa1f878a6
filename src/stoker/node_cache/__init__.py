"""The node cache: objects at URLs, kept on this machine's disk, downloaded once however many processes ask."""
