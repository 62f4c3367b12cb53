"""Random kills, and what is left after each: `python benchmarks/kills.py [--stub 190] [--real 10] [--seed 0]`.

Each round starts a server for one owner, and at a random moment between its first second and a while after it is ready
one process gets a signal: the owner (SIGINT, SIGTERM, SIGHUP or SIGKILL), the supervisor, its guard, the API server, the
engine core or its worker (SIGKILL). Then the owner leaves. An orphan is any process of the round, found in /proc by its
environment, that still runs 30 s later, or a port that is not free. Not tried: two signals at once. The stub has vLLM's
process tree and ends none of it by itself; the real rounds run vLLM's CPU engine with the teaching model.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent / "tests/faults")]
from harness import Place  # noqa: E402

OWNER = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
VICTIMS = [("owner", n) for n in OWNER] + [
    (p, signal.SIGKILL) for p in ("supervisor", "guard", "api", "core", "worker")
]


def round_(place: Place, victim: tuple[str, signal.Signals], moment: float, ask: bool) -> tuple[str, str, list[str]]:
    """One kill at `moment` seconds, with `ask` while a request runs: (what was killed, in which state the server was, what was left)."""
    owner = place.owner("begun", ask=ask)
    time.sleep(moment)
    state = place.server().get("status", "not launched")
    target = None if victim[0] == "owner" else place.part(victim[0])
    with suppress(psutil.Error, ProcessLookupError):
        target.send_signal(victim[1]) if target else owner.send_signal(
            victim[1] if victim[0] == "owner" else signal.SIGKILL
        )
    name = f"{victim[0] if target else 'owner'} {victim[1].name}"
    time.sleep(0.5)
    owner.kill()  # the owner leaves, whatever it is doing
    clean = place.clean(30)
    left = [] if clean else [f"{p.pid} {p.name()}" for p in place.left()] or [f"port {place.port}"]
    for p in place.left():
        with suppress(psutil.Error):
            p.kill()
    owner.stdout.close()
    owner.stderr.close()
    owner.wait(30)
    return name, state, left


def rounds(count: int, real: bool, seed: int, folder: Path, jobs: int, span: float = 0.0) -> dict:
    """`count` kills within `span` seconds (0: a first start is timed); {"kills", "orphans", "states", "victims"}."""
    dice, model = random.Random(seed), ""
    span = span or (0.0 if real else 3.0)
    if real:
        os.environ["QRECIPE_STATE"] = str(folder / "model")
        from qrecipe.chapter import teaching_model

        model = str(teaching_model())
    if not span:
        began, place = time.monotonic(), Place(folder / "first", model=model)
        owner = place.owner()
        span = 1.15 * (time.monotonic() - began)
        owner.kill()
        owner.wait()
        assert place.clean(60)
    first = 4 * (seed - 1)  # so that short runs of other seeds have other victims
    plan = [(VICTIMS[(first + i) % len(VICTIMS)], dice.uniform(0, span), dice.random() < 0.3) for i in range(count)]
    dice.shuffle(plan)

    def one(i: int):
        place = Place(folder / f"{'real' if real else 'stub'}-{i}", "load=0.5 bind=0.3", model=model)
        found = round_(place, *plan[i])
        print(f"{i + 1:4}  {found[0]:20} while {found[1]:13} left: {', '.join(found[2]) or 'nothing'}", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, range(count)))
    return {
        "kills": len(found), "orphans": sum(bool(left) for *_, left in found),
        "states": dict(Counter(state for _, state, _ in found)), "victims": dict(Counter(name for name, *_ in found)),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stub", type=int, default=190)
    parser.add_argument("--real", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--span", type=float, default=0.0, help="seconds of the real start, when known")
    parser.add_argument("--jobs", type=int, default=2, help="stub rounds at a time")
    told = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, count, jobs in (("stub", told.stub, told.jobs), ("real", told.real, 1)):
            if count:
                result[name] = rounds(
                    count, name == "real", told.seed, Path(folder), jobs, told.span * (name == "real")
                )
                print(f"{name}: {result[name]['kills']} kills, {result[name]['orphans']} orphans", flush=True)
    print(json.dumps(result))
    return 1 if any(r["orphans"] for r in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
