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

ROOT = Path(__file__).resolve().parent.parent
LOWEST, HIGHEST = (3, 11), (3, 13)


class SetupError(Exception):
    """A sentence for the person at the keyboard."""


def find_python() -> str:
    """The running Python when it fits, else one of the fitting ones on PATH."""
    if LOWEST <= sys.version_info[:2] <= HIGHEST:
        return sys.executable
    for minor in (12, 13, 11):
        if found := shutil.which(f"python3.{minor}"):
            if subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
                return found
    raise SetupError(
        f"Python {sys.version_info[0]}.{sys.version_info[1]} is here, 3.11 to 3.13 is needed and none is on PATH: install one, or name it (make PYTHON=/path/to/python3.12 …)"
    )


def fingerprint(engine: str, python: str) -> str:
    """The hash of everything that `.venv` is made from."""
    digest = hashlib.sha256(f"{engine} {python} {ROOT}".encode())
    for name in (f"requirements/{engine}.txt", "requirements/uv.txt", "pyproject.toml", "qrecipe/alias.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def run(words: list[str], what: str, mend: str) -> None:
    """Run one step with its own output; a failure becomes one sentence."""
    print(f"set-up: {what}", flush=True)
    env = dict(os.environ)
    if "PIP_INDEX_URL" in env:  # the reader's own mirror, said once for both installers
        env.setdefault("UV_DEFAULT_INDEX", env["PIP_INDEX_URL"])
    done = subprocess.run(words, env=env, cwd=ROOT, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SetupError(f"{what} failed (exit code {done.returncode}): {mend}")


def set_up(asked: str) -> str:
    """Do what is missing. Returns the engine."""
    from .errors import RecipeError

    python = find_python()
    try:
        from .layers import choose_engine, gather, preflight

        version = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:3])"], capture_output=True, text=True, check=True
        )
        facts = dataclasses.replace(gather(), python=tuple(map(int, version.stdout.split())))
        engine, reason = choose_engine(facts, asked)
    except RecipeError as e:
        raise SetupError(str(e)) from None
    venv, inside = ROOT / ".venv", ROOT / ".venv/bin/python"
    stamp, wanted = venv / "qrecipe-stamp", fingerprint(engine, python)
    if stamp.is_file() and stamp.read_text() == wanted and inside.exists():
        return engine
    print(f"set-up: engine {engine}: {reason}", flush=True)
    if not stamp.exists():
        try:
            preflight(facts, engine, str(ROOT))
        except RecipeError as e:
            raise SetupError(str(e)) from None
    stamp.unlink(missing_ok=True)
    network = "is the network there? A mirror is set with UV_DEFAULT_INDEX (or PIP_INDEX_URL); then run the same command again, what is done is kept"
    if not inside.exists() or subprocess.run([str(inside), "-c", "import pip"], capture_output=True).returncode:
        run([python, "-m", "venv", "--clear", str(venv)], "making .venv", "on Debian and Ubuntu install python3-venv")
    run(
        [
            str(inside),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--require-hashes",
            "-r",
            "requirements/uv.txt",
        ],
        "fetching uv",
        network,
    )
    uv = [str(venv / "bin/uv"), "pip", "install", "--python", str(inside), "--no-deps"]
    uv += [] if sys.stderr.isatty() else ["-q"]
    size = "6 GB, half a minute on a fast line" if engine == "cpu" else "10 GB"
    run(
        [*uv, "--require-hashes", "-r", f"requirements/{engine}.txt"],
        f"installing requirements/{engine}.txt ({size})",
        network,
    )
    run([*uv, "--no-build-isolation", "-e", "."], "installing qrecipe", "see the message above")
    run([str(inside), "-m", "qrecipe.alias", "install"], "the vllm distribution alias", "see the message above")
    shutil.copytree(ROOT / "qrecipe/data/lab", venv / "share/jupyter/lab/settings", dirs_exist_ok=True)  # its defaults
    stamp.write_text(wanted)
    return engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m qrecipe.install", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="auto", help="auto, cpu or gpu")
    try:
        set_up(parser.parse_args().engine)
    except SetupError as e:
        print(f"set-up: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("set-up: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
