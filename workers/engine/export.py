"""Exports a checkpoint: ``python -m workers.engine.export RUN_DIR --into FOLDER``, a Hugging Face folder.

The last line of stdout is what was written, an object in JSON. Exit status: 0 done, 1 failed, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rubato.problems import RubatoError
from workers.engine.checkpoint.export import FORMATS, export
from workers.engine.run import RunDirectory


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.engine.export", description="Export a checkpoint.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the directory of a run")
    parser.add_argument("--into", metavar="FOLDER", type=Path, required=True, help="the folder to write, a new one")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    parser.add_argument("--dtype", choices=FORMATS, help="of the weights (default: as the model began, else float32)")
    options = parser.parse_args(arguments)
    try:
        written = export(
            RunDirectory(options.run_dir), options.into.absolute(), options.step, options.dtype, tell=_tell
        )
    except RubatoError as error:
        sys.stderr.write(f"error: {error.detail}\n  fix: {error.fix}\n")
        return 1 if error.status >= 500 else 2
    sys.stdout.write(json.dumps({**written.__dict__, "path": str(written.path)}) + "\n")
    return 0


def _tell(done: int, whole: int) -> None:
    sys.stderr.write(f"{done} of {whole} files are written\n")


if __name__ == "__main__":
    sys.exit(main())
