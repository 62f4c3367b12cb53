"""Keeps what a chapter run with `restarts=True` found (`finish(restarts=rows)`) as its recorded result for that engine.

    python benchmarks/keep_restarts.py RUN/06_multimodal.json [NOTE]

The note says what else a reader must know of the machine.
"""

import json
import sys
from pathlib import Path

from qrecipe import restarts
from qrecipe.errors import BadInput
from qrecipe.paths import read_record, write_whole

KEPT = ("chapter", "engine", "device", "versions", "date", "model", "restarts")


def keep(result: str | Path, note: str = "") -> Path:
    """Keep the restarts in a chapter's NAME.json as recorded ones."""
    facts = read_record(Path(result))
    if not facts.get("restarts"):
        raise BadInput(f"{result} holds no restarts: run its chapter with -p restarts True")
    path = restarts.FOLDER / f"{facts['chapter']}-{facts['engine']}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps({k: facts[k] for k in KEPT} | {"note": note}, indent=1, ensure_ascii=False) + "\n")
    return path


if __name__ == "__main__":
    print(keep(*sys.argv[1:3]))
