"""Is a model folder complete? Configuration, tokenizer, every shard of the index at its full size; nothing is loaded.

The header of a safetensors file says where each tensor's bytes end, so that a cut file is found without reading it (by
the safetensors library). Not covered: what the weights hold (`fetch` compares hashes) and other formats.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import BadInput

INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "merges.txt", "tokenizer.model", "*.tiktoken")


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk. `missing`: one phrase a fault; `revision`: commit, tag or branch where the folder tells it."""

    path: Path
    revision: str | None
    complete: bool
    missing: tuple[str, ...]
    gib: float = 0.0  # size of the weights


def check_folder(path: str | Path, weights: bool = True) -> ModelFolder:
    """Look through a model folder. Never raises for what is missing; `weights=False` leaves them out (dummy load)."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return ModelFolder(folder, None, False, ("the folder" + " (this is a file)" * folder.exists(),))
    missing: list[str] = []
    config = _read_json(folder / "config.json", missing)
    if config is not None and not config.get("model_type"):
        missing.append("model_type in config.json")
    _read_json(folder / "tokenizer_config.json", missing)
    if config and config.get("vision_config"):
        _read_json(folder / "preprocessor_config.json", missing)
    _has_content(next((f for name in TOKENIZERS for f in folder.glob(name)), folder / TOKENIZERS[0]), missing)
    size = sum(_check_shard(folder / name, missing) for name in _shards(folder, missing)) if weights else 0
    return ModelFolder(folder, revision_of(folder), not missing, tuple(missing), size / 2**30)


def require_folder(path: str | Path, weights: bool = True) -> ModelFolder:
    """`check_folder`, but an incomplete folder is BadInput that names what is missing."""
    found = check_folder(path, weights)
    if not found.complete:
        named = "; ".join(found.missing[:5])
        raise BadInput(f"model folder {found.path} is incomplete, missing: {named}: fetch it again or name another one")
    return found


def revision_of(folder: Path) -> str | None:
    """The revision that a folder tells of itself: a hub's cache names it, a download to a folder notes it in .cache."""
    real = folder.resolve()
    if real.parent.name == "snapshots":
        return real.name
    notes = (note.read_text() for note in (folder / ".cache/huggingface/download").glob("*.metadata"))
    return next((commit.group(0) for note in notes if (commit := re.match(r"[0-9a-f]{40}", note))), None)


def _has_content(file: Path, missing: list[str]) -> bool:
    """The file is there, not empty and no Git LFS pointer; else it goes to `missing`."""
    start = b""
    with suppress(OSError), open(file, "rb") as f:
        start = f.read(100)
    if start and b"git-lfs" not in start:
        return True
    state = " (a Git LFS pointer)" if start else " (empty, or not readable)" if file.is_file() else ""
    missing.append(file.name + state)
    return False


def _read_json(file: Path, missing: list[str]) -> dict | None:
    """The JSON object in a file, None (and a word in `missing`) where there is none."""
    if _has_content(file, missing):
        with suppress(ValueError):
            if isinstance(value := json.loads(file.read_bytes()), dict):
                return value
        missing.append(f"{file.name} as a JSON object")
    return None


def _shards(folder: Path, missing: list[str]) -> list[str]:
    """Names of the weight files: those of the index where there is one."""
    if not (folder / INDEX).exists():
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        if not names or any("-of-" in name for name in names):
            missing.append(INDEX if names else f"weights (model.safetensors, or {INDEX} and its shards)")
        return names
    placed = (_read_json(folder / INDEX, missing) or {}).get("weight_map")
    if not placed or not isinstance(placed, dict):
        missing.append(f"weight_map in {INDEX}")
        return []
    return sorted({Path(str(name)).name for name in placed.values()})  # an index must not lead out of the folder


def _check_shard(file: Path, missing: list[str]) -> int:
    """Size of a weight file in bytes; what is wrong with it goes to `missing`."""
    from safetensors import SafetensorError, safe_open

    if not _has_content(file, missing):
        return 0
    size = file.stat().st_size
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as e:
        missing.append(f"{file.name} in full ({size:,} bytes are here; cut, too long or damaged: {e})")
    return size
