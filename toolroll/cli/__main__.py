"""Run the `toolroll` command as `python -m toolroll.cli`."""

from toolroll.cli.app import main

main()
