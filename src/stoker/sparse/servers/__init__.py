"""Parameter servers: separate processes that store the rows, on the hosts of the trainers or on others.

`RowServers` gives their addresses to `SparseEmbeddings`; `stoker.sparse.servers.row_server.RowServer` is one of them.
"""

from stoker.sparse.servers.served_rows import RowServers

__all__ = ["RowServers"]
