"""Rollout viewer under its name in verl: `python scripts/rollout_viewer.py DIR`.

Equivalent to `toolroll view DIR`, with the same options.
"""

import sys

from toolroll.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "view")
    main()
