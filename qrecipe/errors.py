"""Errors meant for a person: what was found, what was expected, what mends it."""

from __future__ import annotations


class RecipeError(Exception):
    """One sentence a reader can act on; shown without a traceback in notebooks and on the command line."""

    exit_code = 2  # bad usage or input

    def _render_traceback_(self) -> list[str]:  # IPython's hook: the message is the whole story
        return [f"{type(self).__name__}: {self}"]


class BadInput(RecipeError):
    """A parameter, file or configuration that cannot be used."""


class NotCovered(RecipeError):
    """A model or configuration outside what the memory law covers."""


class ServerFailed(RecipeError):
    """The server did not start, died, or did not answer."""

    exit_code = 1


class RequestFailed(RecipeError):
    """A request that the server refused or did not finish."""

    exit_code = 1


class ChapterSkipped(RecipeError):
    """A chapter that cannot run on this machine now; the message says why."""
