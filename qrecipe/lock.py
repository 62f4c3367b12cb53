"""Whether what is installed is what a lock file pins: only then may a run name the lock."""

import hashlib
from pathlib import Path

from packaging.requirements import Requirement

from .facts import installed


def lock_facts(lock: Path) -> dict:
    """For run.json: the lock's name; its sha256, or None when the environment departs from it; and the departures."""
    found = departures(lock) if lock.is_file() else [f"{lock.name} is not there"]
    digest = None if found else hashlib.sha256(lock.read_bytes()).hexdigest()
    return {"lock": lock.name, "lock_sha256": digest, "lock_departures": found}


def departures(lock: Path) -> list[str]:
    """Each package that the lock pins for this Python and platform and that is absent or there in another version."""
    out = []
    for line in lock.read_text(encoding="utf-8").splitlines():
        if not line or not line[0].isalnum():
            continue
        pinned = Requirement(line.rstrip(" \\"))
        if pinned.marker and not pinned.marker.evaluate():
            continue
        if not (there := installed(pinned.name)):
            out.append(f"{pinned.name} is not installed")
        elif not pinned.specifier.contains(there, prereleases=True):
            out.append(f"{pinned.name} {there} instead of {str(pinned.specifier).removeprefix('==')}")
    return out
