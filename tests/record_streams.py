"""Record streams of a running server into tests/data/streams.

    qrecipe serve --keep --extra=--enable-auto-tool-choice --extra=--tool-call-parser --extra=hermes
    python tests/record_streams.py [--url U] [NAME …]
    python tests/record_streams.py --kill engine      (ends that server; again with --kill server on another)

One file a stream: the first line says what was asked, of which server and when, and what was killed while it ran; each
further line is [seconds since the request, the bytes that came, as text]. Bytes that end inside a character are kept as
surrogates. Only the book's own server, on this machine, is killed.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path

import httpx
import psutil
from replay import STREAMS

from qrecipe.teaching_model import answer

OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ALL = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
LAST = {"stream_options": {"include_usage": True}}
HELD_BACK = "阶乘😀🙂🙃🤗 done"  # an emoji is several tokens, and its bytes wait for the last of them
TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "the temperature in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "unit": {"enum": ["celsius"]}},
            "required": ["city", "unit"],
        },
    },
}


def chat(topic: str, language: str = "en", **extra) -> tuple[str, dict]:
    body = {
        "messages": [{"role": "user", "content": answer(topic, language).question}],
        "temperature": 0,
        "max_tokens": 400,
    }
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
    "tool-named": chat(
        "hello", **OFF, **ALL, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "temperature"}}
    ),
    "tool-required": chat("hello", **OFF, **LAST, tools=[TOOL], tool_choice="required"),
    "held-back": chat("hello", **OFF, **ALL, structured_outputs={"choice": [HELD_BACK]}),
    "split": chat("factorial", "zh", **OFF, **LAST),
}
PIECE = {"split": 7}  # read so many bytes at a time, so that characters come in halves
KILLED = chat("request", **OFF, **ALL, ignore_eos=True)


def record(
    base_url: str, model: str, path: str, body: dict, size: int | None = None, on_piece=None
) -> list[tuple[float, bytes]]:
    """The raw pieces of one streamed answer, with their times; as many as came when the connection breaks."""
    pieces, start = [], time.perf_counter()
    with httpx.stream("POST", base_url + path, json=body | {"model": model, "stream": True}, timeout=120) as reply:
        reply.raise_for_status()
        try:
            for data in reply.iter_raw(size):
                pieces.append((time.perf_counter() - start, data))
                if on_piece:
                    on_piece(len(pieces))
        except httpx.RemoteProtocolError:
            pass
    return pieces


def blanks(folder: str) -> dict[str, int]:
    """A bias against the tokens of white space alone, which JSON's grammar lets the teaching model write for ever."""
    vocabulary = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return {str(i): -100 for token, i in vocabulary.items() if set(token) <= set("ĠĊĉč")}


def killer(url: str, what: str):
    """A callback that kills the engine core, or the whole API server, when the eighth piece has come."""
    port = httpx.URL(url).port
    server = psutil.Process(
        next(c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port)
    )
    victim = (
        server
        if what == "server"
        else next(p for p in server.children() if "EngineCore" in " ".join([p.name(), *p.cmdline()]))
    )
    return lambda count: victim.kill() if count == 8 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="some of: " + ", ".join(ASKED))
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--kill", choices=["engine", "server"])
    args = parser.parse_args()
    url = args.url.rstrip("/")
    served = httpx.get(url + "/models").json()["data"][0]
    model = served["id"]
    version = httpx.get(url.removesuffix("/v1") + "/version").json().get("version", "unknown")
    kill = {"killed": args.kill} if args.kill else {}
    asked = (
        {f"{args.kill}-killed": KILLED}
        if kill
        else {n: a for n, a in ASKED.items() if not args.names or n in args.names}
    )
    for name, (path, body) in asked.items():
        bias = {"logit_bias": blanks(served["root"])} if "tools" in body else {}
        pieces = record(url, model, path, body | bias, PIECE.get(name), killer(url, args.kill) if kill else None)
        head = {
            "asked": {"path": "/v1" + path, **body},
            "no_blank_tokens": bool(bias),
            "server": f"vLLM {version}",
            "model": model,
            "recorded": str(date.today()),
            **kill,
        }
        lines = [head, *([round(t, 4), data.decode("utf-8", "surrogateescape")] for t, data in pieces)]
        file = STREAMS / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{name}: {len(pieces)} pieces, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
