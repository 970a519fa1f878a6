"""Suppression of libraries' output."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def quiet_environment() -> None:
    """Silences libraries in this process and its children; must be called before they are loaded."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def quiet_libraries() -> None:
    """Suppresses progress bars and advice of libraries."""
    quiet_environment()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    logging.disable(logging.WARNING)  # for all libraries: one logs even to standard output
    if "transformers" in sys.modules:  # else the environment variable does, without the import
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
