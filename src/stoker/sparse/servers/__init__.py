"""Parameter servers: processes of their own that hold the rows, on the hosts of the trainers or on others.

`RowServers` names them for `SparseEmbeddings`; `stoker.sparse.servers.row_server.RowServer` is one of them.
"""

from stoker.sparse.servers.served_rows import RowServers

__all__ = ["RowServers"]
