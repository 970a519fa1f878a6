"""llama.cpp's own server, from the package xllamacpp, in a separate process.

Run as ``python -m stoker.serve.llamacpp_process``, it reads its settings as JSON from standard input, writes its
address, and ends when standard input closes, so it ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import sys


def _main() -> None:
    settings = json.loads(sys.stdin.readline())
    # Printing libraries must not corrupt the address: from here on, standard output is redirected to standard error.
    reply_to = os.dup(1)
    os.dup2(2, 1)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.model_alias = {settings["name"]}
    params.n_parallel = settings["rows"]
    params.kv_unified = True  # one cache for all answers, so that a long one may use the space of several short ones
    params.n_ctx = 0  # the model's context length
    params.use_jinja = True
    params.ui = False
    params.verbosity = 1  # errors only
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # spinning threads stall on a busy machine
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [settings["key"]]
    server = xllamacpp.Server(params)
    with os.fdopen(reply_to, "w") as stream:
        stream.write(server.listening_address + "\n")
    sys.stdin.read()
    os._exit(0)  # the server's threads may not end on their own


if __name__ == "__main__":
    _main()
