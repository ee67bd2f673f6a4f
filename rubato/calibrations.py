"""The file of what was measured of this cluster's workers, by kind of device; under RUBATO_HOME."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rubato.durable import write_durably
from rubato.plans import Calibration
from rubato.problems import RubatoError

_FILE = "calibration.json"
_STORED = TypeAdapter(dict[str, Calibration])


def calibration_file(home: Path) -> Path:
    """Where it lies."""
    return home / _FILE


def read_calibrations(home: Path) -> dict[str, Calibration]:
    """What was measured, by device; empty where nothing was.

    Raises:
        RubatoError: the file is there and cannot be used.
    """
    path = calibration_file(home)
    try:
        return _STORED.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        cause = error.strerror if isinstance(error, OSError) else f"{error.error_count()} values of it make no sense"
        raise RubatoError(
            f"{path} cannot be used: {cause}",
            fix="run `rubato calibrate` again, or delete the file",
            code="calibration_unreadable",
            status=503,
        ) from error


def keep_calibration(home: Path, measured: Calibration) -> Path:
    """Stores what was measured in place of what there was of the same device. Raises RubatoError."""
    path = calibration_file(home)
    try:
        known = read_calibrations(home)
    except RubatoError:
        known = {}  # what cannot be read is what is replaced
    known[measured.alone.device] = measured
    try:
        home.mkdir(parents=True, exist_ok=True)
        write_durably(path, _STORED.dump_json(known, indent=2).decode() + "\n")
    except OSError as error:
        raise RubatoError(
            f"{path} cannot be written: {error.strerror}",
            fix=f"make {home} writable, or set RUBATO_HOME to another folder",
            code="calibration_unwritable",
            status=503,
        ) from error
    return path
