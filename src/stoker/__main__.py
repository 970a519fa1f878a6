"""``python -m stoker`` is the command ``stoker``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, whose files are not Stoker's
    from stoker.cli.main import main

    sys.exit(main())
