"""The notebook's side of a run: `begin` checks the parameters and finds the engine, `finish` writes what was measured."""

import ast
import hashlib
import importlib.metadata as metadata
import json
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from .cards import find_card
from .checks import check_number
from .errors import BadInput, ChapterSkipped
from .fetch import revision_of
from .paths import project_root, runs_dir, state_dir, writable, write_whole
from .recipe import GPU_MODEL, TEACHING, ServeRecipe, recipe_for
from .serving import Server
from .show_table import table

CLOSING = "qrecipe: {name} complete"
SKIPPED = "qrecipe: {name} skipped"
INJECTED = ("PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH")
CHOICES = {"engine": ("auto", "cpu", "gpu"), "weights": ("real", "dummy")}
LIMITS = {
    "port": (1024, 65535),
    "context": (1, 10**8),
    "utilization": (0.01, 1, float),
    "seats": (1, 200),
    "cap": (16, 10**6),
    "max_model_len": (16, 10**8),
    "watch_seconds": (0, 10**5, float),
    "reset_seat": (0, 200),
    "rounds": (0, 10**4),
    "exercise_minutes": (0, 120, float),
}
LIMITS |= dict.fromkeys(("max_tokens", "input_len", "output_len", "need_len", "need_requests"), (1, 10**8))
LIMITS |= dict.fromkeys(("most_cards", "cards_a_host"), (1, 10**4))
SHORTER = "the longest answer must be shorter than the longest request, which holds the prompt as well"
ORDERED = (  # a parameter, the one that it stays below, by how much at least, why
    ("cap", "max_model_len", 1, SHORTER),
    ("reset_seat", "seats", 0, "a seat from 1 to seats is expected, or 0 for none"),
)
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
    exercises: dict = field(default_factory=dict)  # number -> state and tries, kept by `exercise`
    _server: Server | None = None

    @property
    def weights(self) -> str:
        """Whose words come back: "teaching", "real", "dummy", or "unknown" on a foreign server."""
        model = self.parameters.get("model", "auto")
        if self.engine == "attached":
            model = self._server.root if self._server else ""
        elif self.parameters.get("weights") == "dummy":
            return "dummy"
        if Path(model).name.startswith(TEACHING) or (model, self.engine) == ("auto", "cpu"):
            return "teaching"
        return "unknown" if self.engine == "attached" else "real"

    @property
    def words(self) -> bool:
        """True when the teaching model answers, so that exact words may be asserted."""
        return self.weights == "teaching"

    @cached_property
    def model_dir(self) -> str:
        """The folder (or hub id) that the server loads; of a foreign server that which it names as its root."""
        from .fetch import find_model

        model, dummy = self.parameters.get("model", "auto"), self.parameters.get("weights") == "dummy"
        if self.engine == "attached" and self._server:
            return self._server.root
        if model == "auto" and dummy:
            return str(exact_shape("Qwen3.5-4B"))
        if model == "auto" and self.engine != "gpu":
            return str(teaching_model())
        return str(find_model(GPU_MODEL if model == "auto" else model, weights=not dummy).path)

    @property
    def folder(self) -> Path:
        """Where this chapter writes: beside its executed copy, else a run folder of its own."""
        own = f"{datetime.fromtimestamp(self.began):%Y%m%d-%H%M%S}-{self.name}"
        return writable(told_folder() or runs_dir() / own)

    def recipe(self, **changes) -> ServeRecipe:
        """The serve command of this chapter's engine, model and port."""
        given = {"port": 8000, "weights": "real"} | self.parameters
        return recipe_for(self.engine, self.model_dir, port=int(given["port"]), weights=given["weights"], **changes)

    def server(self, recipe: ServeRecipe | None = None) -> Server:
        """The server to talk to: the one at `base_url`, the running one with these flags, or a new one (which takes its time)."""
        from .progress import StartProgress

        if self._server is None and (base_url := self.parameters.get("base_url")):
            self._server = Server.attach(base_url)
        elif self._server is None:
            progress = StartProgress(self.engine)
            self._server = Server.start(recipe or self.recipe(), grace=grace_time(), on_progress=progress)
        return self._server

    @property
    def tokenizer_dir(self) -> str:
        """The folder of the served model's tokenizer; where that is not here the teaching model's, which is the same."""
        return self.model_dir if Path(self.model_dir).is_dir() else str(teaching_model())

    @cached_property
    def tokenizer(self) -> Any:
        """The served model's `tokenizers.Tokenizer`, loaded in half a second (transformers' own class loads PyTorch first)."""
        from tokenizers import Tokenizer

        file = Path(self.tokenizer_dir) / "tokenizer.json"
        if not file.is_file():
            raise BadInput(f"{file} is not there: AutoTokenizer.from_pretrained(…).save_pretrained(…) writes it")
        return Tokenizer.from_file(str(file))

    def prompt(self, messages: list[dict], **switches) -> str:
        """The text that the model's chat template, a Jinja file, makes of messages, up to where the answer begins."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        file, older = (Path(self.tokenizer_dir) / f for f in ("chat_template.jinja", "tokenizer_config.json"))
        text = file.read_text() if file.is_file() else json.loads(older.read_text())["chat_template"]
        rules = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        return rules.from_string(text).render(messages=messages, add_generation_prompt=True, **switches)


def server_url(parameters: dict) -> str:
    """The server that a chapter of these parameters attaches to: `base_url`, else $QRECIPE_BASE_URL, else none."""
    return parameters.get("base_url") or os.environ.get("QRECIPE_BASE_URL", "")


def open_chapter(name: str, parameters: dict) -> Chapter:
    """A chapter of these parameters, its engine chosen. Raises BadInput for values that no chapter can work with."""
    from .layers import card_names, choose_engine, gather

    check_values(parameters)
    facts, base_url = gather(), parameters.get("base_url")
    device = card_names(facts.gpus) or f"{facts.cpu_name or 'CPU'}, {len(os.sched_getaffinity(0))} cores"
    attached = ("attached", f"base_url names the server at {base_url}")
    engine, reason = attached if base_url else choose_engine(facts, parameters.get("engine", "auto"))
    return Chapter(name, engine, reason, parameters, device, versions())


def begin(name: str, **parameters) -> Chapter:
    """Open a chapter: refuse parameters it does not know and bad values, choose the engine, print what it runs on.

    `parameters` are all names of the cell tagged `parameters`. Raises BadInput with the sentence that mends it.
    """
    from IPython.display import display

    global _current
    figures = load_ahead("matplotlib.figure", "matplotlib.backends.backend_agg")
    if _current is not None and _current._server is not None:
        _current._server.leave()
    for cell in shell().user_ns.get("In", []) if shell() else []:
        if cell.lstrip().startswith("# Parameters"):  # papermill itself only warns of a name that it does not find
            check_names(assigned(cell).keys() - set(INJECTED), parameters.keys(), "this chapter has")
    if url := server_url(parameters):
        parameters["base_url"] = url
        if shell():
            shell().user_ns["base_url"] = url  # as if it stood in the cell of the parameters
    _current = chapter = open_chapter(name, parameters)
    if url:
        chapter.server()
    rows = {"engine": f"{chapter.engine}: {chapter.reason}", "device": chapter.device}
    rows["versions"] = ", ".join(f"{k} {v}" for k, v in chapter.versions.items())
    if chapter.weights == "dummy":
        rows["weights"] = "dummy: random numbers in the exact shape; every word that the model says is noise"
    if not os.environ.get("QRECIPE_QUIET"):
        display(table(rows, ["this chapter runs on", ""]))
    if not attended():  # half a second here, so that no later cell waits for it; a reader reads meanwhile
        figures.join()
    return chapter


def load_ahead(*modules: str) -> Thread:
    """Import modules beside what runs, in a notebook, so that its first figure or request need not wait a second for them."""
    loading = Thread(target=lambda: [import_module(m) for m in modules if shell()], daemon=True)
    loading.start()
    return loading


def while_you_read(*modules: str) -> None:
    """Import modules before the cell that needs them, where somebody reads what stands above it; unattended it would save nothing."""
    if attended():
        load_ahead(*modules)


def current(asked: str) -> Chapter:
    """The chapter that runs; `asked` is what needs one."""
    if _current is None:
        raise BadInput(f"{asked}() without begin(): run the chapter from its first cell")
    return _current


def assigned(source: str) -> dict[str, ast.expr]:
    """What a cell's plain assignments give to each name."""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.Assign)]
    return {t.id: n.value for n in nodes for t in n.targets if isinstance(t, ast.Name)}


def check_names(given: Iterable[str], known: Iterable[str], whose: str) -> None:
    """Refuse parameters that nobody knows."""
    if unknown := sorted(set(given) - set(known)):
        raise BadInput(f"unknown parameter {', '.join(unknown)}: {whose} {', '.join(sorted(known))}")


def check_values(parameters: dict) -> None:
    """Refuse values that no chapter can work with."""
    for name, choices in CHOICES.items():
        if name in parameters and parameters[name] not in choices:
            raise BadInput(f"{name} {parameters[name]!r}: expected one of {', '.join(choices)}")
    base_url = parameters.get("base_url", "")
    if not isinstance(base_url, str) or (base_url and not base_url.startswith(("http://", "https://"))):
        raise BadInput(f"base_url {base_url!r}: expected an address like http://127.0.0.1:8000/v1, or an empty text")
    model = parameters.get("model", "auto")
    if not isinstance(model, str) or not model:
        raise BadInput(f"model {model!r}: expected 'auto', a folder or a hub id")
    if model.startswith(("/", "~")) and not Path(model).expanduser().is_dir():
        raise BadInput(f"model {model!r}: there is no such folder")
    for name in ("seat_runs", "all_runs"):
        if (folder := parameters.get(name)) and not Path(str(folder)).is_dir():
            raise BadInput(f"{name} {folder!r}: there is no such folder")
    address = parameters.get("address", "localhost")
    if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", str(address)):
        raise BadInput(
            f"address {address!r}: expected a host's name or number alone, such as 192.0.2.7 or [2001:db8::7]"
        )
    for card in [parameters["card"]] if "card" in parameters else parameters.get("cards", []):
        find_card(card)
    for name, limits in LIMITS.items():
        if name in parameters:
            check_number(parameters[name], name, *limits)
    for low, high, below, why in ORDERED:
        if low in parameters and high in parameters and not parameters[low] <= parameters[high] - below:
            raise BadInput(f"{low} is {parameters[low]} and {high} {parameters[high]}: {why}")
    lengths = parameters.get("prompt_lengths", [1])
    for length in lengths if lengths and isinstance(lengths, list) else [lengths]:
        check_number(length, "each of prompt_lengths", 1, 10**8)
    if "answers" in parameters:
        from .exercise import check_answers

        check_answers(parameters["answers"])


def finish(measured: dict | None = None, next_step: str = "", **facts) -> None:
    """Close the chapter: show what was measured, write NAME.json, print its path and the line that a run is judged by.

    `measured` maps a name to a value or to (value, unit). Under papermill the server is left, and if this was its last
    owner it is gone when the cell ends.
    """
    from IPython.display import display

    chapter = current("finish")
    pairs = {k: v if isinstance(v, tuple) else (v, "") for k, v in (measured or {}).items()}
    if pairs:
        display(table([(k, *pair) for k, pair in pairs.items()], ["measured", "value", "unit"]))
    if chapter.exercises:
        from . import exercise

        display(exercise.card())
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
    chapter = current("skip")
    print(why)
    _close(chapter, "skipped", {}, {"why": why})
    print(SKIPPED.format(name=chapter.name))
    if attended() or not shell():
        raise ChapterSkipped(why)
    shell().input_transformers_post.append(lambda lines: [])


def _close(chapter: Chapter, status: str, measured: dict, facts: dict) -> None:
    """Write NAME.json and leave the server."""
    record = {
        "chapter": chapter.name, "status": status, "engine": chapter.engine, "weights": chapter.weights, "device": chapter.device,
        "versions": chapter.versions, "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": round(time.time() - chapter.began, 1), "measured": measured, "model": model_facts(chapter), **facts,
    }  # fmt: skip
    path = chapter.folder / f"{chapter.name}.json"
    plain = json.dumps(record, default=lambda v: v.item() if hasattr(v, "item") else str(v))
    finite = json.loads(plain, parse_constant=lambda word: None)  # NaN and Infinity are no JSON
    write_whole(path, json.dumps(finite, indent=1, ensure_ascii=False) + "\n")
    if chapter._server is not None:
        chapter._server.leave(wait=45.0 if grace_time() == 0 else 0.0)
    near = path.resolve().is_relative_to(project_root())  # else this machine's folders are not named
    print(f"wrote {path.resolve().relative_to(project_root()) if near else path.name}")


def told_folder() -> Path | None:
    """The folder of the executed copy when the runner names it."""
    told = (shell() and shell().user_ns.get("PAPERMILL_OUTPUT_PATH")) or os.environ.get("QRECIPE_OUT")
    if not told:
        return None
    return Path(told) if Path(told).is_dir() else Path(told).parent


def model_facts(chapter: Chapter) -> dict:
    """Name, and where a pinned folder tells it, revision of the model that answered."""
    if chapter._server is None and "model_dir" not in vars(chapter):
        return {}
    folder = Path(chapter.model_dir)
    facts = {"name": folder.name if os.sep in chapter.model_dir else chapter.model_dir}
    revision = revision_of(folder) if folder.is_dir() else None
    return facts | ({"revision": revision} if revision else {})


def teaching_model() -> Path:
    """The teaching model's folder, built when it is not there yet (seconds). Its name carries what it was built from."""
    from . import teaching_model as package

    digest = hashlib.sha256()
    for file in sorted(Path(package.__file__).parent.rglob("*.*")):
        if file.parent.name == "folder" or file.name in (
            "trained.safetensors",
            "build.py",
            "weights.py",
            "tokenizer.py",
        ):
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
    return 600.0 if attended() else 0.0


def attended() -> bool:
    """Whether a person's front end (JupyterLab) runs this kernel; not where papermill does, be it from JupyterLab's terminal."""
    with suppress(psutil.Error, AttributeError):  # a parent that is gone, or that cannot be looked at
        if "papermill" in " ".join(psutil.Process().parent().cmdline()):
            return False
    return bool(os.environ.get("JPY_SESSION_NAME"))


def shell():
    """The IPython shell of this process, None in plain Python."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def versions() -> dict[str, str]:
    """Installed versions of what a number depends on."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("vllm", "torch", "transformers"):
        found[name] = next((d.version for d in metadata.distributions(name=name)), "not installed")
    return found
