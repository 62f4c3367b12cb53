"""Assemble model folders: the teaching model's own, and folders without weights for real Qwen3.5 shapes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qrecipe.errors import BadInput

from .tokenizer import write_tokenizer

HERE = Path(__file__).parent
CONFIG = HERE / "config.json"
TRAINED = HERE / "trained.safetensors"

_VISION = {
    "do_convert_rgb": True,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
_IMAGES = _VISION | {"image_processor_type": "Qwen2VLImageProcessorFast"}
_VIDEOS = _VISION | {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
}
# Pixels of a picture after resizing: at least 64 tokens; at most 16,384 tokens, or 1,024 for the teaching model, which
# saves half a minute of vLLM's warm-up.
SHORTEST_EDGE, LONGEST_EDGE, TEACHING_LONGEST_EDGE = 65_536, 16_777_216, 1_048_576
TRANSFORMERS = {"transformers_version": "5.17.0"}  # transformers warns of a config.json without one
_GENERATION = {
    "bos_token_id": 248044,
    "eos_token_id": [248046, 248044],
    "pad_token_id": 248044,
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 0.95,
    "top_k": 20,
}


def config() -> dict:
    """config.json of the teaching model: Qwen3.5's architecture with 17 million parameters."""
    return json.loads(CONFIG.read_text(encoding="utf-8"))


@contextmanager
def _whole_or_nothing(directory: str | Path) -> Iterator[Path]:
    """A temporary folder beside `directory` that takes its place when the block ends well, and vanishes otherwise."""
    target = Path(directory).expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise BadInput(f"{target} is a file, and a folder is to be made there; name another folder.")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise BadInput(f"{target} holds files that are no model; name an empty or a new folder.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as problem:
        raise BadInput(f"{target} cannot be made ({problem.strerror}); name a folder that you may write to.") from None
    try:
        yield draft
        draft.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.replace(target, old / target.name)
            os.replace(draft, target)
            shutil.rmtree(old)
        else:
            os.replace(draft, target)
    except OSError as problem:
        raise BadInput(f"{target} could not be written ({problem.strerror}); free some space, 50 MB, there.") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _write_all_but_weights(directory: Path, facts: dict, longest_edge: int) -> None:
    write_tokenizer(directory)
    _write_json(directory / "config.json", facts)
    _write_json(directory / "generation_config.json", _GENERATION)
    size = {"shortest_edge": SHORTEST_EDGE, "longest_edge": longest_edge}
    _write_json(directory / "preprocessor_config.json", _IMAGES | {"size": size})
    _write_json(directory / "video_preprocessor_config.json", _VIDEOS)


def build(directory: str | Path, *, trained: str | Path = TRAINED) -> Path:
    """Write the teaching model into `directory` (about 45 MB, some 7 s) and return its path.

    A model folder that is already there is replaced in one step; nothing half-written is left behind. `trained` is the
    file that `qrecipe.teaching_model.train` writes; the default is the one in the package.
    """
    from .weights import assemble, read_safetensors, write_safetensors

    source = Path(trained)
    if not source.is_file():
        raise BadInput(f"the trained part {source} was not found; `python -m qrecipe.teaching_model.train` makes it.")
    with _whole_or_nothing(directory) as draft:
        facts = config()
        _write_all_but_weights(draft, facts, TEACHING_LONGEST_EDGE)
        write_safetensors(draft / "model.safetensors", assemble(read_safetensors(source), facts))
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
        _write_all_but_weights(draft, TRANSFORMERS | _known(config), LONGEST_EDGE)
    return Path(directory).expanduser().absolute()
