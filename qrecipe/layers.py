"""The layers under a model server on this machine: what is there, which engine fits, can it be installed.

    python3 -m qrecipe.layers                                        # the layers; exit code 1 with the first broken one
    python3 -m qrecipe.layers --engine auto                          # prints cpu or gpu, the reason goes to stderr
    python3 -m qrecipe.layers --preflight --engine cpu --folder .    # one sentence; exit code 2 when it cannot be installed

Standard library alone: the Makefile runs this with the system's Python before anything is installed.
Facts are gathered by `facts`, judged by `layer_judge`; both are found under this name too.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import shutil
import sys
from dataclasses import asdict

from .errors import BadInput
from .facts import GIB, Facts, Gpu, gather
from .layer_judge import (
    Layer,
    first_broken,
    has_kernels,
    judge_driver,
    judge_layers,
    judge_machine,
    judge_processor,
    rule,
)

__all__ = [
    "Facts", "Gpu", "Layer", "choose_engine", "doctor", "first_broken", "gather", "has_kernels", "inspect_layers",
    "judge_layers", "preflight", "rule",
]  # fmt: skip

ENGINES = ("auto", "cpu", "gpu")
RECIPE_GIB = 13  # 8.61 weights + 1.9 activations + 0.3 other + 1.1 KV cache of one 32,768-token request, over 0.90
INSTALL_GIB = {"cpu": 7, "gpu": 12}  # the environment of each engine on disk


def inspect_layers(engine: str = "auto") -> list[Layer]:
    """The layers of this machine and of this Python environment, from the ground up."""
    return judge_layers(gather(), engine)


def choose_engine(facts: Facts, asked: str = "auto") -> tuple[str, str]:
    """("gpu" or "cpu", the reason in words): what is asked for where it can be had, else BadInput with one sentence.

    "auto" takes the GPU where a fitting NVIDIA driver and enough memory are found; an installed vLLM decides by its build.
    """
    if asked not in ENGINES:
        raise BadInput(f"engine {asked!r} is not known: expected one of {', '.join(ENGINES)}")
    _require(judge_machine(facts))
    build = "cpu" if facts.cpu_build else "gpu" if facts.vllm else ""
    if build and asked not in ("auto", build):
        raise BadInput(f"engine {asked!r} was asked for, but the installed vLLM is the {build} build: make setup ENGINE={asked}, or take engine {build!r}")
    driver, processor = judge_driver(facts), judge_processor(facts)
    card = max(facts.gpus, key=lambda gpu: gpu.memory_gib, default=None)
    no_gpu = f"{driver.found} ({driver.why.rstrip('.')})" if driver.ok is False else ""
    if card and not no_gpu and card.capability and card.capability < (7, 5):
        no_gpu = f"{card.name} (CUDA 13 builds have kernels from compute capability 7.5 on, this card has {card.capability[0]}.{card.capability[1]})"
    small = f"{card.name} has {card.memory_gib:.1f} GiB where the book's recipe wants {RECIPE_GIB}" if card and card.memory_gib < RECIPE_GIB else ""
    if "gpu" in (asked, build):
        if no_gpu:
            raise BadInput(f"the gpu engine needs an NVIDIA GPU and a fitting driver, found: {no_gpu}; {driver.mend or 'ENGINE=cpu runs here'}")
        return "gpu", _card(facts, card) + (f"; tight: {small}" if small else "")
    if asked == "auto" and not (build or no_gpu or small):
        return "gpu", _card(facts, card)
    if processor.ok is False:
        raise BadInput(f"neither engine can run here: GPU: {no_gpu or small or 'not asked for'}; processor: {processor.found}: {processor.mend}")
    why = "asked for" if asked == "cpu" else "the CPU build is installed" if build else small or f"GPU driver: {no_gpu}"
    return "cpu", f"{why}; {processor.found.split(': ', 1)[1]}"


def _card(facts: Facts, card: Gpu) -> str:
    return f"{card.name}, {card.memory_gib:.1f} GiB, driver {facts.driver}, CUDA up to {facts.driver_cuda or '?'}"


def _require(ground: Layer) -> None:
    if ground.ok is False:
        raise BadInput(f"{ground.why.rstrip('.')} (found: {ground.found}; needed: {ground.needed}): {ground.mend}")


def preflight(facts: Facts, engine: str, folder: str = ".") -> str:
    """Look before the install: system and Python, `ensurepip`, a writable folder, free disk. Says what was seen, or raises BadInput."""
    if engine not in INSTALL_GIB:
        raise BadInput(f"engine {engine!r} is not known: expected cpu or gpu")
    _require(judge_machine(facts))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise BadInput(f"cannot write in {os.path.abspath(folder)}: copy the book to a folder of your own")
    if glob.glob(os.path.join(glob.escape(folder), ".venv", "lib", "python3*", "site-packages", "vllm")):
        return "an environment with vLLM is there already"
    if not importlib.util.find_spec("ensurepip") and not shutil.which("uv"):
        version = ".".join(map(str, facts.python[:2]))
        raise BadInput(f"this Python {version} cannot make environments (it has no ensurepip): sudo apt install python{version}-venv, or install uv")
    free, need = shutil.disk_usage(folder).free / GIB, INSTALL_GIB[engine]
    if free < need:
        raise BadInput(f"{free:.1f} GiB are free on the disk of {os.path.abspath(folder)}, the {engine} engine's environment takes about {need}: free some, or move the book")
    cache = os.environ.get("UV_CACHE_DIR") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "uv")
    while not os.path.exists(cache) and os.path.dirname(cache) != cache:
        cache = os.path.dirname(cache)
    if os.stat(cache).st_dev != os.stat(folder).st_dev and shutil.disk_usage(cache).free / GIB < need:
        raise BadInput(f"{shutil.disk_usage(cache).free / GIB:.1f} GiB are free on the disk of uv's cache ({cache}), about {need} are needed: set UV_CACHE_DIR to a folder beside the book")
    return f"{free:.0f} GiB free, about {need} needed"


def doctor(engine: str = "auto", as_json: bool = False) -> int:
    """Print the layers, then the first broken one with its mend. Exit code 0, or 1 when a layer is broken."""
    layers = inspect_layers(engine)
    broken = first_broken(layers)
    if as_json:
        rows = [{**asdict(layer), "verdict": layer.verdict} for layer in layers]
        print(json.dumps({"layers": rows, "first_broken": broken.name if broken else None, "mend": broken.mend if broken else None}, indent=1))
        return 1 if broken else 0
    for layer in layers:
        print(f"{layer.verdict:8} {layer.name:16} {layer.found}")
        print(f"{'':25} needed: {layer.needed}\n{'':25} {layer.why}" + (f"\n{'':25} mend: {layer.mend}" if layer.mend else ""))
    print(f"First broken layer: {broken.name}. Mend: {broken.mend}" if broken else "No layer is broken.")
    return 1 if broken else 0


def main(argv: list[str] | None = None) -> int:
    """The command line of this module; exit codes 0 good, 1 a layer is broken, 2 cannot be used or installed here."""
    import argparse

    parser = argparse.ArgumentParser(prog="python3 -m qrecipe.layers", description="The layers under the server.")
    parser.add_argument("--engine", help="auto, cpu or gpu: print the engine to use here")
    parser.add_argument("--preflight", action="store_true", help="can that engine's environment be installed in --folder?")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--json", action="store_true", help="the layers as JSON")
    args = parser.parse_args(argv)
    try:
        if args.preflight:
            print(preflight(gather(), args.engine or "cpu", args.folder))
        elif args.engine and not args.json:
            engine, reason = choose_engine(gather(), args.engine)
            print(reason, file=sys.stderr)
            print(engine)
        else:
            return doctor(args.engine or "auto", args.json)
    except BadInput as e:
        print(e, file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
