"""qrecipe: the helper package of the book. Names and modules load on first use, so that `import qrecipe` stays light."""

from importlib import import_module
from pkgutil import iter_modules

__version__ = "0.1.0"

_WHERE = {
    "begin": "chapter",
    "finish": "chapter",
    "skip": "chapter",
    "ServeRecipe": "recipe",
    "Server": "serving",
    "ModelShape": "shape",
    "budget": "memory",
    "read_log": "startup_log",
    "diagnose": "diagnosis",
    "dissect": "request",
}
__all__ = list(_WHERE)


def __getattr__(name: str):
    if name in _WHERE:
        return getattr(import_module(f"qrecipe.{_WHERE[name]}"), name)
    if name in {m.name for m in iter_modules(__path__)}:
        return import_module(f"qrecipe.{name}")
    raise AttributeError(f"module 'qrecipe' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_WHERE, *(m.name for m in iter_modules(__path__))})
