"""Record streams of a running server into tests/data/streams: python tests/record_streams.py [--url U].

One file a stream: the first line says what was asked, of which server and when; each further line is
[seconds since the request, the bytes that came, as text]. Bytes that end inside a character are kept as surrogates.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date

import httpx
from replay import STREAMS

from qrecipe.teaching_model import answer

OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ALL = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
LAST = {"stream_options": {"include_usage": True}}


def chat(topic: str, language: str = "en", **extra) -> tuple[str, dict]:
    body = {"messages": [{"role": "user", "content": answer(topic, language).question}], "temperature": 0, "max_tokens": 400}
    return "/chat/completions", body | extra


ASKED = {
    "plain": chat("kv_cache", **OFF, **ALL),
    "thinking": chat("kv_cache", **ALL),
    "thinking-zh": chat("factorial", "zh", **ALL),
    "usage-last": chat("kv_cache", **OFF, **LAST),
    "no-usage": chat("kv_cache", **OFF),
    "length": chat("request", **OFF, **ALL, max_tokens=12),
    "two-choices": chat("hello", **OFF, **ALL, n=2, temperature=1.0, seed=1),
    "completion": ("/completions", {"prompt": "1 2 3", "max_tokens": 6, "temperature": 0, "ignore_eos": True} | ALL),
}


def record(base_url: str, model: str, path: str, body: dict) -> list[tuple[float, bytes]]:
    """The raw pieces of one streamed answer, with their times."""
    pieces, start = [], time.perf_counter()
    with httpx.stream("POST", base_url + path, json=body | {"model": model, "stream": True}, timeout=120) as reply:
        reply.raise_for_status()
        for data in reply.iter_raw():
            pieces.append((time.perf_counter() - start, data))
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    url = parser.parse_args().url.rstrip("/")
    model = httpx.get(url + "/models").json()["data"][0]["id"]
    version = httpx.get(url.removesuffix("/v1") + "/version").json().get("version", "unknown")
    for name, (path, body) in ASKED.items():
        pieces = record(url, model, path, body)
        head = {"asked": {"path": "/v1" + path, **body}, "server": f"vLLM {version}", "model": model, "recorded": str(date.today())}
        lines = [head, *([round(t, 4), data.decode("utf-8", "surrogateescape")] for t, data in pieces)]
        file = STREAMS / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{name}: {len(pieces)} pieces, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
