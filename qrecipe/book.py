"""Runs chapters with papermill, judges each one (judge.py), and keeps what they left: `qrecipe run`."""

import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import nbformat
import yaml

from . import serving
from .chapter import Chapter, assigned, check_names, check_values, open_chapter, server_url
from .checks import whole_number
from .errors import BadInput, RecipeError
from .judge import Verdict, judge
from .paths import ROOM, fresh_folder, homeless, project_root, read_record, runs_dir, writable, write_whole
from .processes import die_with_parent

WAITING = "import sys, ipykernel.kernelspec; from papermill.cli import papermill; sys.stdin.readline() and papermill()"
say = partial(print, flush=True)


def find_notebooks(names: list[str]) -> list[Path]:
    """The notebooks of these names (03, 03_serve, 03_serve.ipynb or a path), all numbered ones when none is named."""
    folder = project_root() / "notebooks"
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not (names or known):
        raise BadInput(f"no notebooks in {folder}: run this from the book's folder")
    found = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        stem = stem.zfill(2) if stem.isdigit() else stem
        hits = [p for p in sorted(folder.glob("*.ipynb")) if stem in (p.stem, p.stem.split("_")[0])]
        if name.endswith(".ipynb") and Path(name).is_file():
            hits = [Path(name).resolve()]
        if not hits:
            stems = [p.stem for p in sorted(folder.glob("*.ipynb"))]
            near = [f"did you mean {n}? " for n in get_close_matches(stem, stems, 1)]
            raise BadInput(f"no notebook {name!r}: {''.join(near)}there are {', '.join(stems) or 'none'}")
        found += hits
    found = list(dict.fromkeys(found)) or known
    if twice := {p.stem for p in found if [q.stem for q in found].count(p.stem) > 1}:  # they would write the same files
        raise BadInput(f"two notebooks are called {', '.join(sorted(twice))}: run them one by one, or rename one")
    return found


def known_parameters(notebook: Path) -> dict[str, object]:
    """Names and defaults of the cell tagged `parameters`."""
    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except Exception as e:
        raise BadInput(f"{notebook.name} is not a notebook ({type(e).__name__}: {str(e)[:80]})") from None
    source = next((c.source for c in cells if "parameters" in c.metadata.get("tags", [])), "")
    return {name: ast.literal_eval(value) for name, value in assigned(source).items()}


def sort_parameters(notebooks: list[Path], given: dict) -> dict[Path, dict]:
    """What of the given parameters each notebook gets; a name that none of them has, or a value of another type, is refused."""
    known, given = {p: known_parameters(p) for p in notebooks}, dict(given)
    check_names(given, set().union(*known.values()), "the chosen chapters have")
    for defaults in known.values():
        for name in given.keys() & defaults.keys():
            wanted = type(defaults[name])
            if wanted is int and isinstance(given[name], str):  # 32K, as everywhere on the command line
                with suppress(ValueError):
                    given[name] = whole_number(given[name])
            value = given[name]
            if not isinstance(value, wanted) and not (wanted is float and isinstance(value, int)):
                expected = f"expected {wanted.__name__}, as in its default {defaults[name]!r}"
                raise BadInput(f"parameter {name}={value!r}: {expected}")
        check_values(defaults | {k: v for k, v in given.items() if k in defaults})
    return {p: {k: v for k, v in given.items() if k in known[p]} for p in notebooks}


def needs_server(notebook: Path) -> bool:
    """Whether this chapter takes the run's server: one with flags of its own (`server(own)`) it starts itself."""
    return re.search(r"\.server\((?!own\))", notebook.read_text()) is not None


def needs_whole_gpu(notebook: Path) -> bool:
    """Whether this chapter keeps an LLM of its own, which on a GPU cannot stand beside the server."""
    return "batch.Offline(" in notebook.read_text()


def run_book(
    names: list[str],
    parameters: dict,
    *,
    out: str | None = None,
    cell_limit: float = 1500,
    run_limit: float = 5400,
    publish_in: str | None = None,
    note: str = "",
) -> tuple[bool, Path]:
    """Run the chapters in order against one server. Returns (no chapter failed, run folder). Limits in seconds.

    A failing chapter does not hide the others. Whatever ends this, the server is stopped and the report is written;
    with `publish_in` also a copy there that names no machine. `note` is kept in run.json: what its facts do not tell.
    """
    if url := server_url(parameters):
        parameters = parameters | {"base_url": url}
    notebooks = find_notebooks(names)
    shares = sort_parameters(notebooks, parameters)
    stage = open_chapter("run", {"weights": "real"} | parameters)
    attached = stage.engine == "attached"
    alone = [p for p in notebooks if stage.engine == "gpu" and needs_whole_gpu(p)]
    notebooks = [p for p in notebooks if p not in alone] + alone
    published = new_run_folder(publish_in) if publish_in else None
    folder = new_run_folder(out)
    say(f"engine {stage.engine}: {stage.reason}\nrun folder {folder}")
    clock, verdicts, pages, held, env = time.monotonic(), [], {}, None, {}
    try:
        if attached:
            serving.Server.attach(url)
        elif any(needs_server(p) for p in notebooks if p not in alone):
            say("looking for model and server, building what is not there")
            held = serving.launch(stage.recipe(), log_dir=folder)
            env = {serving.SHARED: serving.read_state(held).get("token", "")}
            say("server starting (chapters that need it wait for it)")
    except RecipeError:  # refused before anything ran: no run, no folder
        with suppress(OSError):
            folder.rmdir()
        raise
    given = [shares[p] | ({} if attached else {"engine": stage.engine}) for p in notebooks]
    due = [Execution(p, share, folder, cell_limit, env) for p, share in zip(notebooks, given, strict=True)]
    try:
        for execution, following in zip(due, [*due[1:], None], strict=True):
            if held and execution.notebook in alone:
                say(f"{execution.name} needs the GPU for itself: leaving the server")
                serving.leave(held, wait=60)
            execution.begin(run_limit - (time.monotonic() - clock))
            if following:
                following.prepare()
            add_page(pages, folder, verdicts)  # of the chapter before, while this one sets up
            verdicts.append(v := execution.verdict())
            if v.status == "failed":
                explain(v, serving.read_state(held) if held else {})
            where = f"cell {v.cell or '?'}: " if v.status == "failed" else ""
            say(f"{v.name}: {v.status}, {v.seconds:.0f} s" + (f" - {where}{v.reason}" if v.reason else ""))
            if v.exercises:
                say(f"  exercises: {v.exercises}")
    finally:
        for execution in due:
            execution.end()
        if held:
            serving.leave(held)
        add_page(pages, folder, verdicts)  # while the server stops
        if held:
            serving.leave(held, wait=60)
        ended = "the run was interrupted"
        verdicts += [
            Verdict(e.name, reason=f"{ended} in it" if e.began else f"not reached: {ended}")
            for e in due[len(verdicts) :]
        ]
        write_run(folder, stage, verdicts, time.monotonic() - clock, held, note, pages)
        if published:
            from .publish import publish

            say(f"copy that names no machine: {publish(folder, published)}")
    return all(v.status != "failed" for v in verdicts), folder


class Execution:
    """One chapter under papermill, in a process of its own that ends with this one."""

    def __init__(self, notebook: Path, parameters: dict, folder: Path, cell_limit: float, env: dict | None = None):
        self.notebook, self.name, self.cell_limit = notebook, notebook.stem, cell_limit
        self.executed = folder / notebook.name
        self.told = self.executed.with_suffix(".papermill.log")
        self.argv = [sys.executable, "-c", WAITING, str(notebook), str(self.executed), "--inject-output-path"]
        self.argv += ["--cwd", str(notebook.parent), "--execution-timeout", str(max(1, round(cell_limit)))]
        self.argv += ["--progress-bar" if sys.stderr.isatty() else "--no-progress-bar"]
        self.argv += ["-y", yaml.safe_dump(parameters)] if parameters else []
        self.env = os.environ | homeless() | (env or {})
        self.process: subprocess.Popen | None = None
        self.began = self.deadline = 0.0

    def prepare(self) -> None:
        """Start the process: it imports papermill beside whatever runs now, and waits for `begin`."""
        with open(self.told, "wb") as log:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stdout=log, stderr=None if sys.stderr.isatty() else log,
                env=self.env, start_new_session=True, preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )  # fmt: skip

    def begin(self, left: float) -> "Execution":
        """Let it run, for `left` seconds at most; it does not begin where there are none."""
        self.began = time.monotonic()
        self.deadline = self.began + left
        if left > 0:
            if self.process is None:
                self.prepare()
            with suppress(BrokenPipeError):
                self.process.stdin.write(b"go\n")
                self.process.stdin.close()
        return self

    def verdict(self) -> Verdict:
        """Wait until it has ended or its time is over, and judge what it left."""
        if self.deadline <= self.began:
            return Verdict(self.name, reason="the time limit of the whole run was reached before it")
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        finally:
            self.end()
        verdict = judge(self.executed, self.executed.with_suffix(".json"), code)
        verdict.seconds = round(time.monotonic() - self.began, 1)
        if code is None:
            verdict.status, verdict.reason = "failed", "the time limit of the whole run was reached"
        elif verdict.status == "failed" and "CellTimeoutError" in serving.tail(self.told, 200):
            verdict.reason = f"the cell was stopped at its limit of {self.cell_limit:.0f} s"
        elif verdict.status == "failed" and "No space left on device" in serving.tail(self.told, 200):
            verdict.reason = f"no space left on the disk of {self.executed.parent}: free some, then run again"
        return verdict

    def end(self) -> None:
        """End what still runs: papermill then saves the copy and shuts its kernel down. One that never began leaves nothing."""
        if self.process is None:
            return
        if self.deadline > self.began:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        else:
            self.told.unlink(missing_ok=True)
        self.process.kill()
        self.process.communicate()


def add_page(pages: dict[str, str], folder: Path, verdicts: list[Verdict]) -> None:
    """The last chapter's part of the report, made while something else is waited for."""
    from .report import chapter_html

    if verdicts and verdicts[-1].name not in pages:
        pages[verdicts[-1].name] = chapter_html(folder / f"{verdicts[-1].name}.ipynb")


def explain(verdict: Verdict, state: dict) -> None:
    """Add the server log's last lines and, from the server's end, its log or else the error itself, cause and mend."""
    from .diagnosis import diagnose

    log = state.get("log", "")
    found = serving.diagnosis(log)
    if not found and (failure := diagnose(verdict.reason)) and failure.known:
        found = asdict(failure)
    ended = f"the server {state['status']}: {state['why']}" if state.get("status") in ("failed", "died") else ""
    verdict.log_tail = serving.tail(log)
    verdict.mend = ". ".join(filter(None, [ended, f"{found['cause']}. Mend: {found['mend']}" if found else ""]))


def new_run_folder(out: str | Path | None) -> Path:
    """`out`, which must be new or empty, or a fresh `runs/STAMP`."""
    if out:
        return writable(fresh_folder(out), room=ROOM)
    folder = runs_dir() / f"{datetime.now():%Y%m%d-%H%M%S}"
    while folder.exists():
        folder = folder.with_name(f"{folder.name}-2")
    return writable(folder)


def write_run(
    folder: Path,
    stage: Chapter,
    verdicts: list[Verdict],
    seconds: float,
    held: Path | None,
    note: str,
    pages: dict[str, str],
) -> None:
    """run.json, junit.xml, summary.md and index.html of a run, also of one that was interrupted."""
    from .lock import lock_facts
    from .report import write_page, write_report

    state = serving.read_state(held) if held else {}
    log = Path(state["log"]) if state else None
    lock = project_root() / "requirements" / f"{'gpu' if stage.engine == 'gpu' else 'cpu'}.txt"
    models = (read_record(folder / f"{v.name}.json").get("model") for v in verdicts)
    try:
        if log and log.is_file() and log.parent != folder:  # the run joined a server that was there before
            log = Path(shutil.copy(log, folder))
        run = {
            "format": 2, "passed": all(v.status != "failed" for v in verdicts),
            "date": datetime.fromtimestamp(stage.began).astimezone().isoformat(timespec="seconds"), "seconds": round(seconds, 1),
            "engine": stage.engine, "reason": stage.reason, "device": stage.device, "versions": stage.versions,
            **lock_facts(lock), "note": note, "weights": stage.parameters["weights"],
            "model": next(filter(None, models), {}) | shard_hashes(state),
            "server": {k: state.get(k) for k in ("ready_seconds", "status", "why")} | {"log": log.name if log else None},
            "chapters": [asdict(v) for v in verdicts],
        }  # fmt: skip
        write_whole(folder / "run.json", json.dumps(run, indent=1, ensure_ascii=False) + "\n")
        for name in ("junit.xml", "summary.md"):
            write_page(folder, name, run=run)
        write_report(folder, run, pages)
    except OSError as e:
        raise BadInput(
            f"the run's results cannot be written in {folder} ({e.strerror}): free some disk; what it holds is kept"
        ) from None


def shard_hashes(state: dict) -> dict:
    """The sha256 of each weights file that the run's server loaded, by file name; {} for a model that is not a local folder."""
    found = {}
    for file in sorted(Path(state["recipe"]["model"]).glob("*.safetensors")) if state else []:
        with open(file, "rb") as f:
            found[file.name] = hashlib.file_digest(f, "sha256").hexdigest()
    return {"shards_sha256": found} if found else {}
