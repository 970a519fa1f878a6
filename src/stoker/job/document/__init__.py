"""The job file as a document: read with the position of every value, changed by overrides, migrated, written."""
