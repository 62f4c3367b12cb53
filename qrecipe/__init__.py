"""qrecipe: the helper package of the book. Names load on first use, so that `import qrecipe` stays light."""

from importlib import import_module

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
_MODULES = (
    "shape",
    "memory",
    "cards",
    "startup_log",
    "diagnosis",
    "request",
    "vision",
    "layers",
    "show",
    "serving",
    "fetch",
    "exercise",
)
__all__ = [*_WHERE, *_MODULES]


def __getattr__(name: str):
    if name in _WHERE:
        return getattr(import_module(f"qrecipe.{_WHERE[name]}"), name)
    if name in _MODULES:
        return import_module(f"qrecipe.{name}")
    raise AttributeError(f"module 'qrecipe' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
