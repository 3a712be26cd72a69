"""``python -m iop.cli``: the same as ``iop``."""

from iop.cli.main import main

main()
