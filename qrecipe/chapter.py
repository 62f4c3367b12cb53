"""The notebook's side of a run: `begin` checks the parameters and finds the engine, `finish` writes what was measured."""

import ast
import hashlib
import importlib.metadata as metadata
import json
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from .errors import BadInput, ChapterSkipped
from .model_folder import revision_of
from .paths import project_root, runs_dir, state_dir, writable, write_whole
from .recipe import GPU_MODEL, TEACHING, ServeRecipe, recipe_for
from .serving import Server

CLOSING = "qrecipe: {name} complete"
SKIPPED = "qrecipe: {name} skipped"
INJECTED = ("PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH")
CHOICES = {"engine": ("auto", "cpu", "gpu"), "weights": ("real", "dummy")}
_current: "Chapter | None" = None


@dataclass
class Chapter:
    """One chapter while it runs. `engine` is "cpu", "gpu" or "attached"; `reason` says why."""

    name: str
    engine: str
    reason: str
    parameters: dict
    device: str
    versions: dict
    began: float = field(default_factory=time.time)
    _server: Server | None = None
    progress: object = None
    exercises: dict = field(default_factory=dict)  # number -> state and tries, kept by `exercise`

    @property
    def weights(self) -> str:
        """Whose words come back: "teaching", "real", "dummy", or "unknown" on a foreign server."""
        if self.engine == "attached":
            return "teaching" if self._server and Path(self._server.root).name.startswith(TEACHING) else "unknown"
        if self.parameters.get("weights") == "dummy":
            return "dummy"
        if self.engine == "cpu" and self.parameters.get("model", "auto") == "auto":
            return "teaching"
        return "teaching" if Path(self.parameters.get("model", "")).name.startswith(TEACHING) else "real"

    @property
    def words(self) -> bool:
        """True when the teaching model answers, so that exact words may be asserted."""
        return self.weights == "teaching"

    @property
    def model_dir(self) -> str:
        """The folder (or hub id) that the server loads; of a foreign server that which it names as its root."""
        if not hasattr(self, "_model_dir"):
            self._model_dir = self._server.root if self.engine == "attached" and self._server else self._find_model()
        return self._model_dir

    def _find_model(self) -> str:
        model, engine = self.parameters.get("model", "auto"), self.engine
        if model == "auto" and self.parameters.get("weights") == "dummy":
            return str(exact_shape("Qwen3.5-4B"))
        if model == "auto" and engine == "gpu":
            model = GPU_MODEL
        if model == "auto":
            return str(teaching_model())
        from .fetch import find_model

        return str(find_model(model, weights=self.parameters.get("weights") != "dummy").path)

    @property
    def folder(self) -> Path:
        """Where this chapter writes: beside its executed copy, else a run folder of its own."""
        return out_dir(self)

    def recipe(self, **changes) -> ServeRecipe:
        """The serve command of this chapter's engine, model and port."""
        p = self.parameters
        return recipe_for(
            self.engine, self.model_dir, port=p.get("port", 8000), weights=p.get("weights", "real"), **changes
        )

    def server(self, recipe: ServeRecipe | None = None) -> Server:
        """The server to talk to: the one at `base_url`, the running one with these flags, or a new one (which takes its time)."""
        if self._server is None:
            if base_url := self.parameters.get("base_url"):
                self._server = Server.attach(base_url)
            else:
                from .progress import StartProgress

                self.progress = StartProgress(self.engine)
                self._server = Server.start(recipe or self.recipe(), grace=grace_time(), on_progress=self.progress)
        return self._server

    @property
    def tokenizer_dir(self) -> str:
        """The folder of the served model's tokenizer; where that is not here the teaching model's, which is the same."""
        return self.model_dir if Path(self.model_dir).is_dir() else str(teaching_model())

    def tokenizer(self):
        """The served model's tokenizer, loaded by transformers, which takes seconds."""
        if not hasattr(self, "_tokenizer"):
            from transformers import AutoTokenizer
            from transformers.utils import logging

            before = logging.get_verbosity()
            logging.set_verbosity_error()  # it warns of another vendor's tokenizer whenever a vocabulary is this large
            self._tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_dir)
            logging.set_verbosity(before)
        return self._tokenizer


def begin(name: str, **parameters) -> Chapter:
    """Open a chapter: refuse parameters it does not know and bad values, choose the engine, print what it runs on.

    `parameters` are all names of the cell tagged `parameters`. Raises BadInput with the sentence that mends it.
    """
    global _current
    if _current is not None and _current._server is not None:
        _current._server.leave()
    check_names(set(parameters))
    check_values(parameters)
    engine, reason, device = place(parameters)
    _current = Chapter(name, engine, reason, parameters, device, versions())
    if parameters.get("base_url"):
        _current.server()
    from .show import table

    rows = {
        "engine": f"{engine}: {reason}",
        "device": _current.device,
        "versions": ", ".join(f"{k} {v}" for k, v in _current.versions.items()),
    }
    if _current.weights == "dummy":
        rows["weights"] = "dummy: random numbers in the exact shape; every word that the model says is noise"
    if not os.environ.get("QRECIPE_QUIET"):
        _display(table(list(rows.items()), ["this chapter runs on", ""]))
    return _current


def check_names(known: set[str]) -> None:
    """Refuse what papermill injected under a name that the chapter does not have (papermill itself only warns)."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    history = shell.user_ns.get("In", []) if shell else []
    for cell in history:
        if cell.lstrip().startswith("# Parameters"):
            given = {
                t.id
                for node in ast.parse(cell).body
                if isinstance(node, ast.Assign)
                for t in node.targets
                if isinstance(t, ast.Name)
            }
            if unknown := sorted(given - known - set(INJECTED)):
                raise BadInput(f"unknown parameter {', '.join(unknown)}: this chapter has {', '.join(sorted(known))}")


def check_values(parameters: dict) -> None:
    """Refuse values that no chapter can work with."""
    for name, choices in CHOICES.items():
        if name in parameters and parameters[name] not in choices:
            raise BadInput(f"{name} {parameters[name]!r}: expected one of {', '.join(choices)}")
    port = parameters.get("port", 8000)
    if isinstance(port, bool) or not isinstance(port, int) or not 1024 <= port <= 65535:
        raise BadInput(f"port {port!r}: expected a whole number from 1024 to 65535")
    base_url = parameters.get("base_url", "")
    if not isinstance(base_url, str) or (base_url and not base_url.startswith(("http://", "https://"))):
        raise BadInput(f"base_url {base_url!r}: expected an address like http://127.0.0.1:8000/v1, or an empty text")
    model = parameters.get("model", "auto")
    if not isinstance(model, str) or not model:
        raise BadInput(f"model {model!r}: expected 'auto', a folder or a hub id")
    if "answers" in parameters:
        from .exercise import check_answers

        check_answers(parameters["answers"])


def finish(measured: dict | None = None, next_step: str = "", **facts) -> None:
    """Close the chapter: show what was measured, write NAME.json, print its path and the line that a run is judged by.

    `measured` maps a name to a value or to (value, unit). Under papermill the server is left, and if this was its last
    owner it is gone when the cell ends.
    """
    chapter = _current
    if chapter is None:
        raise BadInput("finish() without begin(): run the chapter from its first cell")
    pairs = {k: v if isinstance(v, tuple) else (v, "") for k, v in (measured or {}).items()}
    from .show import table

    if pairs:
        _display(table([(k, _number(v), u) for k, (v, u) in pairs.items()], ["measured", "value", "unit"]))
    if chapter.exercises:
        from . import exercise

        _display(exercise.card())
        facts["exercises"] = exercise.summary()
    if next_step:
        print(f"Next: {next_step}")
    _close(chapter, "complete", {k: {"value": v, "unit": u} for k, (v, u) in pairs.items()}, facts)
    print(CLOSING.format(name=chapter.name))


def skip(why: str) -> None:
    """Close the chapter here because it cannot run on this machine now; `why` is one sentence that says what would mend it.

    Writes NAME.json with status "skipped" and prints the line that a run is judged by. In JupyterLab the cell then stops
    with ChapterSkipped, so that no later cell is reached; in an unattended run the later cells are passed over.
    """
    chapter = _current
    if chapter is None:
        raise BadInput("skip() without begin(): run the chapter from its first cell")
    print(why)
    _close(chapter, "skipped", {}, {"why": why})
    print(SKIPPED.format(name=chapter.name))
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or (os.environ.get("JPY_SESSION_NAME") and not _unattended()):
        raise ChapterSkipped(why)
    shell.input_transformers_post.append(lambda lines: [])


def _close(chapter: Chapter, status: str, measured: dict, facts: dict) -> None:
    """Write NAME.json and leave the server."""
    record = {
        "chapter": chapter.name, "status": status, "engine": chapter.engine, "weights": chapter.weights, "device": chapter.device,
        "versions": chapter.versions, "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": round(time.time() - chapter.began, 1), "measured": measured, "model": model_facts(chapter), **facts,
    }  # fmt: skip
    path = out_dir(chapter) / f"{chapter.name}.json"
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False, default=_plain_number) + "\n")
    if chapter._server is not None:
        chapter._server.leave(wait=45.0 if grace_time() == 0 else 0.0)
    print(f"wrote {_near(path)}")


def out_dir(chapter: Chapter) -> Path:
    """The folder of the executed copy when the runner names it, else a run folder of this chapter's own."""
    own = f"{datetime.fromtimestamp(chapter.began):%Y%m%d-%H%M%S}-{chapter.name}"
    return writable(told_folder() or runs_dir() / own)


def told_folder() -> Path | None:
    """The folder of the executed copy when the runner names it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    told = (shell.user_ns.get("PAPERMILL_OUTPUT_PATH") if shell else None) or os.environ.get("QRECIPE_OUT")
    folder = Path(told) if told else None
    return folder if folder is None or folder.is_dir() else folder.parent


def model_facts(chapter: Chapter) -> dict:
    """Name, and where a pinned folder tells it, revision of the model that answered."""
    if chapter._server is None and not hasattr(chapter, "_model_dir"):
        return {}
    folder = Path(chapter.model_dir)
    facts = {"name": folder.name if os.sep in chapter.model_dir else chapter.model_dir}
    if folder.is_dir() and (revision := revision_of(folder)):
        facts["revision"] = revision
    return facts


def teaching_model() -> Path:
    """The teaching model's folder, built when it is not there yet (seconds). Its name carries what it was built from."""
    from . import teaching_model as package

    digest = hashlib.sha256()
    for file in sorted(Path(package.__file__).parent.rglob("*.*")):
        if file.parent.name == "folder" or file.name in ("trained.safetensors", "build.py", "weights.py", "tokenizer.py"):
            digest.update(file.read_bytes())
    folder = state_dir() / "models" / f"{TEACHING}-{digest.hexdigest()[:10]}"
    return folder if (folder / "config.json").is_file() else package.build(folder)


def exact_shape(name: str) -> Path:
    """A model folder with a real model's exact shape and no weights, for `--load-format dummy`."""
    from importlib.resources import files

    from .teaching_model import exact_shape_dir

    folder = state_dir() / "models" / f"{name}-shape"
    if not (folder / "config.json").is_file():
        exact_shape_dir(json.loads((files("qrecipe") / f"data/shapes/{name}.json").read_text()), folder)
    return folder


def grace_time() -> float:
    """Seconds that a server outlives its last owner: ten minutes in JupyterLab, none in unattended runs and on the command line."""
    return 600.0 if os.environ.get("JPY_SESSION_NAME") and not _unattended() else 0.0


def _unattended() -> bool:
    """True when papermill runs this kernel, be it from a terminal in JupyterLab."""
    try:
        return "papermill" in " ".join(psutil.Process().parent().cmdline())
    except (psutil.Error, AttributeError):
        return False


def versions() -> dict[str, str]:
    """Installed versions of what a number depends on."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("vllm", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def place(parameters: dict) -> tuple[str, str, str]:
    """(engine, why it was chosen, device): the GPU's name and memory, else the processor's name and the cores that may be used."""
    from .layers import choose_engine, gather

    facts, base_url = gather(), parameters.get("base_url")
    device = ", ".join(f"{g.name}, {g.memory_gib:.1f} GiB" for g in facts.gpus)
    device = device or f"{facts.cpu_name or 'CPU'}, {len(os.sched_getaffinity(0))} cores"
    if base_url:
        return "attached", f"base_url names the server at {base_url}", device
    return *choose_engine(facts, parameters.get("engine", "auto")), device


def _near(path: Path) -> str:
    """The path as short as it can be said without naming this machine's folders."""
    try:
        return str(path.resolve().relative_to(project_root()))
    except ValueError:
        return path.name


def _number(value) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 10000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )


def _plain_number(value):
    return value.item() if hasattr(value, "item") else str(value)


def _display(item) -> None:
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
        from IPython.display import display

        display(item)
    else:
        print(item)
