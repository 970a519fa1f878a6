"""What a process that trains imports, and what it leaves to those that need it."""

from __future__ import annotations

import subprocess
import sys

TRAINS = "import sys; import stoker.launch.worker, stoker.train.prepare_language; "
LATER = (
    "import peft.helpers; assert 'bitsandbytes' not in sys.modules and peft.helpers.bnb is None; "
    "from peft.import_utils import is_bnb_4bit_available; assert is_bnb_4bit_available(); "
    "from peft.tuners.lora.bnb import Linear4bit; from transformers.utils import is_bitsandbytes_available; "
    "assert 'bitsandbytes' in sys.modules and is_bitsandbytes_available()"
)


def test_bitsandbytes_is_imported_by_what_needs_it() -> None:
    # With another option first it is no copy of a warm process.
    done = subprocess.run([sys.executable, "-u", "-c", TRAINS + LATER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
