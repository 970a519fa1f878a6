"""Data files from the browser: uploads, names, and reads that end at a timeout."""
