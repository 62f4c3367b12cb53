"""Assemble model folders: the teaching model's own, and folders without weights for real Qwen3.5 shapes.

What is the same in every folder, the chat template for example, lies in `folder/` and is copied.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qrecipe.errors import BadInput

from .tokenizer import write_tokenizer

FOLDER = Path(__file__).parent / "folder"
TRAINED = Path(__file__).with_name("trained.safetensors")
# A picture may have 16,384 tokens; the 1,024 of the teaching model's own file save half a minute of vLLM's warm-up.
LONGEST_EDGE = 16_777_216
DRAFT = ".qrecipe-draft-"  # the start of a draft's name
TRANSFORMERS = {"transformers_version": "5.17.0"}  # transformers warns of a config.json without one


def config() -> dict:
    """config.json of the teaching model: Qwen3.5's architecture with 17 million parameters."""
    return _read_json(FOLDER / "config.json")


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _whole_or_nothing(directory: str | Path) -> Iterator[Path]:
    """A draft of a model folder, all but its weights in it, beside `directory`; it takes its place when the block ends
    well and vanishes otherwise. Drafts that a killed process has left there are removed."""
    target = Path(directory).expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise BadInput(f"{target} is a file, and a folder is to be made there; name another folder.")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise BadInput(f"{target} holds files that are no model; name an empty or a new folder.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent), tempfile.TemporaryDirectory(prefix=DRAFT, dir=target.parent) as beside:
            draft = Path(beside) / "new"
            shutil.copytree(FOLDER, draft)
            write_tokenizer(draft)
            yield draft
            if target.exists():
                os.replace(target, Path(beside) / "old")
            os.replace(draft, target)
    except OSError as problem:
        mend = "name a folder that you may write to, with 50 MB of free space"
        raise BadInput(f"{target} cannot be written ({problem.strerror}); {mend}.") from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Says by a lock on `folder` that a draft is at work in it; where none was at work before, what drafts are there are removed.

    A lock ends with its process, however that ends. A file system without locks keeps such leftovers.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in folder.glob(f"{DRAFT}*"):
                shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def build(directory: str | Path, *, trained: str | Path = TRAINED) -> Path:
    """Write the teaching model into `directory` (about 45 MB, some 7 s) and return its path.

    A model folder that is already there is replaced in one step; nothing half-written is left behind. `trained` is the
    file that training/train.py writes; the default is the one in the package.
    """
    from .weights import assemble, read_safetensors, write_safetensors

    source = Path(trained)
    if not source.is_file():
        raise BadInput(f"the trained part {source} was not found; training/train.py makes it.")
    with _whole_or_nothing(directory) as draft:
        write_safetensors(draft / "model.safetensors", assemble(read_safetensors(source), config()))
    return Path(directory).expanduser().absolute()


def _known(facts: dict) -> dict:
    """The facts at every depth without those that are "unknown", and without notes (names with a leading underscore)."""
    return {
        name: _known(value) if isinstance(value, dict) else value
        for name, value in facts.items()
        if value != "unknown" and not name.startswith("_")
    }


def exact_shape_dir(config: dict, directory: str | Path) -> Path:
    """Write a model folder without weights for a real Qwen3.5 `config`, to be served with `--load-format dummy`.

    Same tokenizer and chat template as the teaching model, and the published limits on a picture's pixels. What the
    configuration calls "unknown" is left out, so that vLLM takes its own default instead of refusing the word.
    """
    vocabulary = config.get("text_config", config).get("vocab_size", 0)
    if vocabulary < 248_077:
        raise BadInput(
            f"the configuration has a vocabulary of {vocabulary} entries, and Qwen3.5's tokenizer has 248077; "
            "give the configuration of a Qwen3.5 model."
        )
    with _whole_or_nothing(directory) as draft:
        _write_json(draft / "config.json", TRANSFORMERS | _known(config))
        pictures = _read_json(draft / "preprocessor_config.json")
        pictures["size"]["longest_edge"] = LONGEST_EDGE
        _write_json(draft / "preprocessor_config.json", pictures)
    return Path(directory).expanduser().absolute()
