"""Lessons that need a start with other flags: such a server for the length of a block, and results of an earlier one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import BadInput
from .paths import read_record
from .serving import Server

FOLDER = Path(__file__).parent / "data/restarts"


@contextmanager
def restarted(chapter: Any, **flags: Any) -> Iterator[Server]:
    """A server of this chapter's recipe with other flags, on the next port, stopped when the block ends.

    On a GPU the chapter's own server is stopped first: two do not fit on one card, so such a lesson comes last. Raises
    BadInput where the server is another's.
    """
    if chapter.engine == "attached":
        raise BadInput("restarts starts servers of its own: leave base_url empty")
    if chapter.engine == "gpu":
        chapter.server().stop()
    recipe = chapter.recipe(**flags)
    server = Server.start(recipe.with_(port=recipe.port + 1))
    try:
        yield server
    finally:
        server.stop()


def recorded(chapter: Any) -> tuple[Any, str]:
    """(what was found, stamp) of this chapter's recorded restarts: those of its engine where there are some, else the CPU engine's."""
    kept = read_record(FOLDER / f"{chapter.name}-{chapter.engine}.json") or read_record(
        FOLDER / f"{chapter.name}-cpu.json"
    )
    if not kept:
        return [], "nothing recorded"
    note = f" ({kept['note']})" if kept["note"] else ""
    return kept["restarts"], f"recorded: {kept['device']}, vLLM {kept['versions']['vllm']}, {kept['date'][:10]}{note}"
