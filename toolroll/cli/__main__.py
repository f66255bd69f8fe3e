"""`python -m toolroll.cli` is `toolroll`."""

from toolroll.cli.app import main

main()
