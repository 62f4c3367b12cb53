"""Runs chapters with papermill, judges each one, and keeps what they left: `qrecipe run`.

A chapter passes when papermill's exit code is 0 AND every code cell has an execution count AND the closing line was
printed AND its JSON is there. papermill's own status fields are not asked: after a dead kernel they say "completed".
A chapter that says it cannot run here (`qrecipe.skip`) is skipped: neither passed nor failed.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import nbformat
import yaml

from . import serving
from .chapter import CLOSING, SKIPPED, Chapter, check_values, device_name, versions
from .errors import BadInput, RecipeError
from .paths import project_root, runs_dir, writable, write_whole

CELL_LIMIT = 1500  # seconds one cell may take: a first start on a GPU takes 460
RUN_LIMIT = 5400  # seconds for the whole run
LOG_TAIL = 30  # lines of the server log that a failed chapter's verdict carries


@dataclass
class Verdict:
    """How one chapter ended. `status` is passed, failed or skipped; a failed one names its cell and why."""

    name: str
    status: str = "failed"
    seconds: float = 0.0
    reason: str = ""
    cell: str = ""
    line: str = ""
    measured: dict = field(default_factory=dict)


def find_notebooks(names: list[str]) -> list[Path]:
    """The notebooks of these names (03, 03_serve, 03_serve.ipynb or a path), all numbered ones when none is named."""
    folder = project_root() / "notebooks"
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not names:
        if not known:
            raise BadInput(f"no notebooks in {folder}: run this from the book's folder")
        return known
    out = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        hits = [p for p in known if p.stem == stem or p.stem.split("_")[0] == stem]
        if Path(name).suffix == ".ipynb" and Path(name).is_file():
            hits = [Path(name).resolve()]
        if not hits:
            raise BadInput(f"no notebook {name!r}: there are {', '.join(p.stem for p in known) or 'none'}")
        out += [h for h in hits if h not in out]
    return out


def known_parameters(notebook: Path) -> dict[str, object]:
    """Names and defaults of the cell tagged `parameters`."""
    import ast

    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except Exception as e:
        raise BadInput(f"{notebook.name} is not a notebook ({type(e).__name__}: {str(e)[:80]})") from None
    source = next((c.source for c in cells if "parameters" in c.metadata.get("tags", [])), "")
    return {
        t.id: ast.literal_eval(n.value) for n in ast.parse(source).body if isinstance(n, ast.Assign) for t in n.targets
    }


def sort_parameters(notebooks: list[Path], given: dict) -> dict[Path, dict]:
    """What of the given parameters each notebook gets; a name that none of them has, or a value of another type, is refused."""
    known = {p: known_parameters(p) for p in notebooks}
    names = set().union(*known.values())
    if unknown := sorted(set(given) - names):
        raise BadInput(f"unknown parameter {', '.join(unknown)}: the chosen chapters have {', '.join(sorted(names))}")
    check_values(given)
    for defaults in known.values():
        for name in given.keys() & defaults.keys():
            wanted, value = type(defaults[name]), given[name]
            if not isinstance(value, wanted) and not (wanted is float and isinstance(value, int)):
                raise BadInput(
                    f"parameter {name}={value!r}: expected {wanted.__name__}, as in its default {defaults[name]!r}"
                )
    return {p: {k: v for k, v in given.items() if k in known[p]} for p in notebooks}


def judge(executed: Path, record: Path, exit_code: int | None) -> Verdict:
    """The verdict on an executed copy, by what it holds and not by what papermill says of it."""
    verdict = Verdict(executed.stem)
    try:
        nb = nbformat.read(executed, as_version=4)
    except Exception as e:
        verdict.reason = f"no readable output notebook ({type(e).__name__})"
        return verdict
    code = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
    for cell in code:
        for output in cell.outputs:
            if output.output_type == "error":
                verdict.cell, verdict.reason = cell.get("id", ""), f"{output.ename}: {_plain(output.evalue)}"
                verdict.line = _failing_line(cell, output)
                return verdict
    printed = "".join(o.get("text", "") for c in code for o in c.outputs if o.output_type == "stream")
    unrun = [c for c in code if c.execution_count is None]
    if unrun:
        verdict.cell, verdict.reason = (
            unrun[0].get("id", ""),
            f"{len(unrun)} of {len(code)} cells were not run (the kernel died or a limit was reached)",
        )
    elif exit_code != 0:
        verdict.reason = f"papermill ended with exit code {exit_code}"
    elif (
        SKIPPED.format(name=executed.stem) in printed.splitlines()
        and (told := _record(record)).get("status") == "skipped"
    ):
        verdict.status, verdict.reason = "skipped", told.get("why", "")
    elif CLOSING.format(name=executed.stem) not in printed.splitlines():
        verdict.reason = "the closing line was not printed: finish() was not reached"
    elif not record.is_file():
        verdict.reason = f"{record.name} was not written"
    else:
        verdict.status, verdict.measured = "passed", json.loads(record.read_text()).get("measured", {})
    return verdict


def _record(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def needs_whole_gpu(notebook: Path) -> bool:
    """Whether this chapter keeps an LLM of its own, which on a GPU cannot stand beside the server."""
    return "batch.Offline(" in notebook.read_text()


def run_book(
    names=(),
    *,
    parameters=None,
    out=None,
    engine="auto",
    weights="real",
    cell_limit=CELL_LIMIT,
    run_limit=RUN_LIMIT,
    publish_in=None,
    note="",
    say=print,
) -> tuple[bool, Path]:
    """Run the chapters in order against one server. Returns (all passed, run folder).

    A failing chapter does not hide the others. Whatever ends this, the server is stopped and the report is written;
    with `publish_in` also a copy there that names no machine. `note` is kept in run.json: what its facts do not tell.
    """
    from .layers import choose_engine, gather

    notebooks = find_notebooks(list(names))
    given = {"engine": engine, "weights": weights} | (parameters or {})
    shares = sort_parameters(notebooks, given)
    attached = given.get("base_url")
    engine, reason = ("attached", f"base_url {attached}") if attached else choose_engine(gather(), given["engine"])
    alone = [p for p in notebooks if engine == "gpu" and needs_whole_gpu(p)]
    notebooks = [p for p in notebooks if p not in alone] + alone
    published = new_run_folder(publish_in) if publish_in else None
    folder = new_run_folder(out)
    stage = Chapter("run", engine, reason, given, device_name(), versions())
    say(f"engine {engine}: {reason}\nrun folder {folder}")
    began, verdicts, held, env = time.time(), [], None, {}
    with _terminable():
        try:
            if attached:
                serving.Server.attach(attached)
            elif any(".server(" in p.read_text() for p in notebooks if p not in alone):
                say("looking for model and server, building what is not there")
                held = serving.launch(stage.recipe(), log_dir=folder)
                env = {serving.SHARED: serving.read_state(held).get("token", "")}
                say("server starting (chapters that need it wait for it)")
        except RecipeError:  # refused before anything ran: no run, no folder
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise
        try:
            for notebook in notebooks:
                if held and notebook in alone:
                    say(f"{notebook.stem} needs the GPU for itself: leaving the server")
                    serving.leave(held, wait=60)
                left = run_limit - (time.time() - began)
                given = shares[notebook] | ({} if attached else {"engine": engine})
                v = run_chapter(notebook, given, folder, cell_limit, left, env)
                verdicts.append(v)
                say(
                    f"{v.name}: {v.status}, {v.seconds:.0f} s"
                    + (f" - cell {v.cell or '?'}: {v.reason}" if v.status == "failed" else "")
                    + (f" - {v.reason}" if v.status == "skipped" else "")
                )
        finally:
            if held:
                serving.leave(held, wait=60)
            write_run(folder, stage, verdicts, began, [p.stem for p in notebooks], held, note)
            if published:
                from .publish import publish

                say(f"copy that names no machine: {publish(folder, published)}")
    return bool(verdicts) and all(v.status != "failed" for v in verdicts), folder


def run_chapter(
    notebook: Path, parameters: dict, folder: Path, cell_limit: float, left: float, env: dict | None = None
) -> Verdict:
    """One chapter under papermill, in a process of its own that ends with this one. Limits in seconds."""
    executed, began = folder / f"{notebook.stem}.ipynb", time.time()
    if left <= 0:
        return Verdict(notebook.stem, reason="the time limit of the whole run was reached before it")
    argv = [sys.executable, "-m", "papermill", str(notebook), str(executed), "--inject-output-path"]
    argv += ["--cwd", str(notebook.parent), "--execution-timeout", str(int(cell_limit))]
    argv += ["--progress-bar" if sys.stderr.isatty() else "--no-progress-bar"]
    argv += ["-y", yaml.safe_dump(parameters)] if parameters else []
    with open(folder / f"{notebook.stem}.papermill.log", "wb") as log:
        err = None if sys.stderr.isatty() else log
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=err, env=os.environ | (env or {}),
            start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        try:
            code, late = process.wait(left), False
        except subprocess.TimeoutExpired:
            code, late = None, True
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # papermill then saves the copy and shuts its kernel down
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    verdict = judge(executed, folder / f"{notebook.stem}.json", code)
    if verdict.status == "failed" and "CellTimeoutError" in (folder / f"{notebook.stem}.papermill.log").read_text(
        errors="replace"
    ):
        verdict.reason = f"the cell was stopped at its limit of {cell_limit:.0f} s"
    if late:
        verdict.status, verdict.reason = "failed", "the time limit of the whole run was reached"
    verdict.seconds = round(time.time() - began, 1)
    return verdict


def new_run_folder(out: str | Path | None) -> Path:
    """`out`, which must be new or empty, or a fresh `runs/STAMP`."""
    if out:
        folder = Path(out).absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{folder} exists and is not an empty folder: name another --out, or remove it")
        return writable(folder)
    base = runs_dir() / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder, n = base, 1
    while folder.exists():
        folder, n = base.with_name(f"{base.name}-{n}"), n + 1
    return writable(folder)


def write_run(
    folder: Path, stage: Chapter, verdicts: list[Verdict], began: float, wanted: list[str], held: Path | None, note=""
) -> None:
    """run.json and index.html of a run, also of one that was interrupted (chapters that were not reached are named)."""
    from .lock import lock_facts
    from .report import write_report

    verdicts = verdicts + [
        Verdict(name, reason="not reached: the run was interrupted") for name in wanted[len(verdicts) :]
    ]
    state = serving.read_state(held) if held else {}
    log = Path(state["log"]) if state else None
    if log and log.is_file() and log.parent != folder:  # the run joined a server that was there before
        log = Path(shutil.copy(log, folder))
    records = {v.name: json.loads(p.read_text()) for v in verdicts if (p := folder / f"{v.name}.json").is_file()}
    engine_lock = project_root() / "requirements" / f"{'gpu' if stage.engine == 'gpu' else 'cpu'}.txt"
    run = {
        "format": 1, "passed": all(v.status != "failed" for v in verdicts), "date": datetime.fromtimestamp(began).astimezone().isoformat(timespec="seconds"),
        "seconds": round(time.time() - began, 1), "engine": stage.engine, "reason": stage.reason, "device": stage.device, "versions": stage.versions,
        **lock_facts(engine_lock), "note": note, "weights": stage.parameters["weights"],
        "model": next((r["model"] for r in records.values() if r.get("model")), {}) | model_hash(state),
        "server": {"ready_seconds": state.get("ready_seconds"), "status": state.get("status"), "why": state.get("why"), "log": log.name if log else None},
        "chapters": [asdict(v) for v in verdicts],
    }  # fmt: skip
    tail = _tail(log) if log and not run["passed"] else ""
    write_whole(folder / "run.json", json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    write_report(folder, run, tail)


def model_hash(state: dict) -> dict:
    """The sha256 of each weights file that the run's server loaded, by file name; {} for a model that is not a local folder."""
    folder = Path(state["recipe"]["model"]) if state else None
    if not folder or not folder.is_dir():
        return {}
    return {"shards_sha256": {p.name: _sha256(p) for p in sorted(folder.glob("*.safetensors"))}}


def _sha256(path: Path) -> str | None:
    import hashlib

    if not path.is_file():
        return None
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _tail(log: Path, lines: int = LOG_TAIL) -> str:
    with open(log, "rb") as f:
        f.seek(max(0, log.stat().st_size - 20_000))
        return "\n".join(f.read().decode("utf-8", "replace").splitlines()[-lines:])


def _plain(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()[:2000]


def _failing_line(cell, output) -> str:
    """The source line that a traceback's arrow points at, "" when it shows none."""
    import re

    for line in reversed("\n".join(output.traceback).splitlines()):
        if m := re.match(r"-+>\s*\d+\s(.*)", _plain(line)):
            return m[1].strip()
    return cell.source.splitlines()[-1] if isinstance(output.traceback, list) and len(output.traceback) == 1 else ""


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextlib.contextmanager
def _terminable():
    """SIGTERM and SIGHUP end the run as Ctrl-C does: server stopped, report written."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
