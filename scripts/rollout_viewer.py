"""The rollout viewer under the name that it has in verl: `python scripts/rollout_viewer.py DIR`.

The same as `toolroll view DIR`, with the same options.
"""

import sys

from toolroll.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "view")
    main()
