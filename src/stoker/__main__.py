"""``python -m stoker`` is the command ``stoker``."""

from __future__ import annotations

import sys

from stoker.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
