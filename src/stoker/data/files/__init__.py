"""Files to rows: compression, JSON, tables, archives, and their locks and digests."""
