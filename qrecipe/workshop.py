"""For a teacher: the answer key as a file, and the class seen from /metrics while it works."""

import math
import re
import time
from contextlib import suppress
from pathlib import Path

from .exercise import _say, _value, book
from .metrics import read_metrics
from .paths import write_whole


def write_key(path: Path) -> Path:
    """Write every exercise's hint and worked solution as Markdown; a figure that needs the reader's own run stays in braces."""
    from .memory import budget
    from .shape import load_shape

    shape = load_shape("Qwen3.5-4B")
    plan = budget(shape, gpu="RTX 4090", max_model_len=4096)
    lines = ["# Answer key", "", "What stands in {braces} is computed from each reader's own run.", ""]
    for name, spec in book().items():
        env = {"shape": shape, "budget": plan, "plan": plan, "ceil": math.ceil}
        with suppress(Exception):
            env["right"] = _value(spec["right"], env)

        def filled(found: re.Match, env: dict = env) -> str:
            with suppress(Exception):
                return _say(found[0], env)
            return found[0]

        lines += [f"## {name} {spec.get('title', '')}", ""]
        for key in ("hint", "solution"):
            text = re.sub(r"\{[^{}]+\}", filled, " ".join(spec.get(key, "").split()))
            text = text.replace("{{", "{").replace("}}", "}")
            lines += [f"**{key.capitalize()}.** {text}", ""] if text else []
    write_whole(path, "\n".join(lines), mode=0o600)
    return path


class Watch:
    """The class at work: one row of /metrics (open without a key) every `every` seconds for `seconds`, drawn in place."""

    COLUMNS = ("seconds", "running", "waiting", "KV cache in use", "answered", "tokens a second")

    def __init__(self, base_url: str, seconds: float = 10.0, every: float = 1.0):
        self.rows: list[tuple] = []
        began, before, handle = time.monotonic(), None, None
        while (now := time.monotonic() - began) < seconds or not self.rows:
            page = read_metrics(base_url)
            made = (
                0.0
                if before is None
                else (page["generation_tokens_total"] - before[1]["generation_tokens_total"]) / (now - before[0])
            )
            self.rows.append((
                round(now), int(page["num_requests_running"]), int(page["num_requests_waiting"]),
                f"{page['kv_cache_usage_perc']:.1%}", page.finished, round(made),
            ))  # fmt: skip
            handle, before = self._draw(handle), (now, page)
            time.sleep(min(every, max(0.0, seconds - (time.monotonic() - began))))

    def _draw(self, handle):
        from .show import table

        view = table(self.rows[-12:], list(self.COLUMNS))
        with suppress(ImportError):
            from IPython.display import display

            if handle is None:
                return display(view, display_id=True)
            handle.update(view)
        return handle
