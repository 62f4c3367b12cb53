"""A copy of a run that names no machine: `qrecipe run --publish DIR`.

Paths, host names and addresses of this machine are replaced in everything that the run left, and every chapter is
stamped with what it ran on. So the copy must be made on the machine of the run, by the Python of the run.
"""

import json
import re
import site
import socket
import sys
import tempfile
from pathlib import Path

import nbformat
import psutil

from .paths import project_root, runs_dir, state_dir, write_whole

TEXT = ".ipynb .json .jsonl .log .md .py .txt .xml".split()  # of a run folder; index.html is written anew
DUMMY = (
    "**Dummy weights**: random numbers in the model's exact shape. Memory and speed are those of the real weights; "
    "every word that the model says below is noise."
)


def publish(folder: Path, out: Path, names: dict[str, str] | None = None) -> Path:
    """Copy the run in `folder` to `out` (there and empty), cleaned and stamped; returns the copy's index.html."""
    from .report import write_report

    clean = cleaner(names or machine_names(folder))
    for file in sorted(p for p in folder.iterdir() if p.suffix in TEXT and not p.name.endswith(".papermill.log")):
        write_whole(out / file.name, clean(file.read_text(encoding="utf-8", errors="replace")))
    run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    for chapter in run["chapters"]:
        if (copy := out / f"{chapter['name']}.ipynb").is_file():
            add_stamp(copy, run)
    return write_report(out, run)


def machine_names(folder: Path) -> dict[str, str]:
    """What would tell this machine from another, and the word that stands for it in a published copy."""
    here = {str(Path(p)): "SITE" for p in (*sys.path, *site.getsitepackages(), site.getusersitepackages()) if p}
    here |= {sys.prefix: "PYTHON", sys.base_prefix: "PYTHON", tempfile.gettempdir(): "TMP", str(Path.home()): "~"}
    here |= {str(p): "STATE" for p in (state_dir(), state_dir().resolve())}
    here |= {str(project_root()): "BOOK", str(runs_dir()): "RUNS", str(folder): "RUN", str(folder.resolve()): "RUN"}
    here = {path: word for path, word in here.items() if path not in ("/", "/usr", ".")}
    hosts = {socket.gethostname(), socket.getfqdn()} - {"localhost"}
    addresses = {a.address.partition("%")[0] for link in psutil.net_if_addrs().values() for a in link}
    keep = ("127.0.0.1", "::1", "0.0.0.0", "00:00:00:00:00:00")
    return here | {name: "HOST" for name in hosts | addresses if len(name) > 2 and name not in keep}


def cleaner(names: dict[str, str]):
    """A function that puts each word in the place of its name, longest name first, also where JSON has escaped it; base64
    is left alone, in which a short name may stand by chance."""
    words = {json.dumps(name)[1:-1]: word for name, word in names.items()} | names
    longest = sorted(words, key=len, reverse=True)
    pattern = re.compile(r"[A-Za-z0-9+/]{256,}|(?<![\w.])(?:" + "|".join(map(re.escape, longest)) + r")(?![\w-])")
    return lambda text: pattern.sub(lambda found: words.get(found[0], found[0]), text)


def stamp(run: dict) -> str:
    """One paragraph (Markdown): device, driver, versions, date, lock or what departs from it, whose words these are."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    where = run["reason"] if run["device"] in run["reason"] else f"{run['device']} ({run['reason']})"
    said = [f"**Executed on** {where}; {versions}; {run['date'][:10]}."]
    first = ("torch ", "triton ", "vllm ", "transformers ")
    away = sorted(run["lock_departures"], key=lambda told: not told.startswith(first))
    if away:
        more = f" and {len(away) - 3} more" if len(away) > 3 else ""
        said.append(f"This is not the environment of requirements/{run['lock']}: {'; '.join(away[:3])}{more}.")
    else:
        said.append(f"Packages as in requirements/{run['lock']} (sha256 {run['lock_sha256'][:12]}…).")
    return " ".join(filter(None, [*said, run["note"], DUMMY if run["weights"] == "dummy" else ""]))


def add_stamp(file: Path, run: dict) -> None:
    """Put the stamp under the title of an executed notebook."""
    nb = nbformat.read(file, as_version=4)
    cell = nbformat.v4.new_markdown_cell(stamp(run))
    cell["id"] = "stamp"
    nb.cells.insert(1, cell)
    write_whole(file, nbformat.writes(nb))
