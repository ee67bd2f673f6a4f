"""The command line: ``rubato``."""

from rubato.cli.app import main

__all__ = ["main"]
