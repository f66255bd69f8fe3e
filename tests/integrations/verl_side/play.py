"""Runs all scenarios and writes the results to a file.

python play.py SPEC     # JSON: paths of the model, questions, rows and result, and URLs of the sandboxes
"""

import json
import sys
import time
from pathlib import Path

import asides
from newer import Newer
from older import Older
from scene import NEWEST, Scene
from verl.utils.config import omega_conf_to_dataclass


def main() -> None:
    start = time.monotonic()
    scene = Scene(json.loads(sys.argv[1]))
    older = Older(scene)  # its workers start in the background
    if NEWEST:
        omega_conf_to_dataclass(older.config.actor_rollout_ref.model)  # imports external_lib, like verl's trainers
    out = {"asides": asides.play(scene), "older": older.play()}
    older.stop()
    out |= {"newer": Newer(scene).play(), "seconds": time.monotonic() - start}
    Path(scene.spec["result"]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
