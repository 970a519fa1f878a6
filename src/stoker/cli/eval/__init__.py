"""The kinds of evaluation of `stoker eval`, one file each, and the report that they share."""
