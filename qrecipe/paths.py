"""Where the book keeps things: the project folder, its state folder (`.qrecipe`) and the run folders (`runs`)."""

import json
import os
import stat
import tempfile
from pathlib import Path

from .errors import BadInput

ROOM = 65536  # bytes that must be free where something is about to be written


def project_root() -> Path:
    """The folder that holds `notebooks/`: upward from the working folder, else beside the package, else the working folder."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    return here


def state_dir() -> Path:
    """`$QRECIPE_STATE`, else `.qrecipe` in the project; made with mode 700. BadInput where everybody may write in it: who
    does could name a server of his own, and be sent the key."""
    folder = writable(Path(os.environ.get("QRECIPE_STATE") or project_root() / ".qrecipe"), mode=0o700)
    if folder.stat().st_mode & stat.S_IWOTH:
        raise BadInput(f"everybody may write in {folder}, where keys are kept: chmod 700 it, or set QRECIPE_STATE")
    return folder


def runs_dir() -> Path:
    """`$QRECIPE_RUNS`, else `runs` in the project."""
    return writable(Path(os.environ.get("QRECIPE_RUNS") or project_root() / "runs"))


def writable(folder: Path, mode: int = 0o777, room: int = 0) -> Path:
    """Make `folder` and show that a file of `room` bytes can be written in it (an empty one can be made on a full disk).

    Raises BadInput with the variable that moves it when it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        with tempfile.TemporaryFile(dir=folder) as f:
            f.write(bytes(room))
    except OSError as e:
        raise BadInput(
            f"cannot write in {folder} ({e.strerror or e}): make it writable, free some disk, or set QRECIPE_STATE and QRECIPE_RUNS to folders that are"
        ) from None
    return folder


def fresh_folder(path: str | Path) -> Path:
    """The folder's absolute path. Raises BadInput where something is in it."""
    folder = Path(path).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists and is not an empty folder: name another one, or remove it")
    return folder


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `text` so that a reader of `path` sees the old file or the new one, never half of it."""
    part = path.with_name(f".{path.name[:80]}-{os.urandom(4).hex()}")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(handle, "w", encoding="utf-8", errors="replace") as f:
            f.write(text)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_record(path: Path) -> dict:
    """A JSON object from a file, {} when there is none that can be read: no device or pipe, no file of over 64 MiB."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and path.stat().st_size < 2**26 else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def homeless() -> dict[str, str]:
    """For a process's environment where the home folder cannot be written: a home in the state folder; {} where it can."""
    home = Path.home()
    if home.is_dir() and os.access(home, os.W_OK):
        return {}
    return {"HOME": str(writable(state_dir() / "home", mode=0o700))}
