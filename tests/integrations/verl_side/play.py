"""Plays all scenes, and writes down what was seen.

python play.py SPEC     # JSON: where model, questions, rows and sandboxes are, and where the result goes
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
    began = time.monotonic()
    scene = Scene(json.loads(sys.argv[1]))
    older = Older(scene)  # its workers start while this goes on
    if NEWEST:
        omega_conf_to_dataclass(older.config.actor_rollout_ref.model)  # as its trainers do: it imports external_lib
    out = {"asides": asides.play(scene), "older": older.play()}
    older.end()
    out |= {"newer": Newer(scene).play(), "seconds": time.monotonic() - began}
    Path(scene.spec["result"]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
