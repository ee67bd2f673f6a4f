"""``python -m rubato`` is the ``rubato`` command, for where no console script was installed."""

from rubato.cli import main

main()
