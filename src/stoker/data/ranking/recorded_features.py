"""Features that a run records as it starts, and by which its rows are parsed from then on."""

from __future__ import annotations

import json

from stoker.data.ranking.features import Features
from stoker.errors import Problem, UserError
from stoker.files import read_file
from stoker.runs.run_folder import RunFolder

FEATURES_FILE = "features.json"  # in the run's folder


def record_of(features: Features) -> str:
    """Returns the text of the file."""
    return json.dumps(features.as_json(), indent=1)


def features_of_run(folder: RunFolder) -> Features:
    """Reads the features that a run parses rows by.

    Raises:
        UserError: the run has no such file, or it has another form.
    """
    path = folder.path / FEATURES_FILE
    try:
        return Features.from_json(json.loads(read_file(path)))
    except OSError as error:
        raise UserError(Problem(f"cannot be read: {error.strerror}", file=str(path))) from error
    except (ValueError, RecursionError) as error:
        raise UserError(Problem("these are not the features of a run", file=str(path))) from error
