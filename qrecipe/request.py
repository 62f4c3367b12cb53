"""One streamed request dissected: when each chunk came, what it carried, and the times that follow from it.

A chunk is not a token: the first one may carry only the role, one may carry several tokens, the last carries the
usage. `dissect` sends one chat (or completion) through the reader's own `openai` client, notes every arrival on the
monotonic clock (`time.perf_counter`), and counts tokens by the best source the server gives (see `_count`).
Not covered: audio, `best_of`, more than one prompt in a request.
"""

import gc
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from .dissection import Chunk, Dissection, Row
from .errors import RequestFailed
from .request_checks import check_request, explain

__all__ = ["Chunk", "Dissection", "Row", "dissect"]


def dissect(
    client: Any,
    *,
    model: str,
    messages: list[dict] | None = None,
    prompt: str | list[int] | None = None,
    max_tokens: int | None = 128,
    temperature: float | None = 0.0,
    extra_body: dict | None = None,
    tokenizer: Any = None,
    **params: Any,
) -> Dissection:
    """Send one streamed request and take it apart.

    `client` is an `openai.OpenAI`; `messages` go to /v1/chat/completions, `prompt` to /v1/completions. `tokenizer`
    (anything with `encode`) counts tokens where the server does not. Other `params` are those of the client's
    `create`; what vLLM adds (top_k, chat_template_kwargs) belongs in `extra_body`. No retries: they would hide in
    the clock. A stream that breaks is kept, with `complete=False`.
    Raises BadInput before anything is sent, RequestFailed when no chunk came.
    """
    check_request(client, model, messages, prompt, max_tokens, temperature, extra_body, params)
    client = client.with_options(max_retries=0)
    create = client.chat.completions.create if prompt is None else client.completions.create
    body = dict(params, model=model, max_tokens=max_tokens, temperature=temperature, extra_body=extra_body)
    body |= {"messages": messages} if prompt is None else {"prompt": prompt}
    body = {k: v for k, v in body.items() if v is not None}
    notes: list[str] = []
    for options in ({"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True}, None):
        try:
            events, marks, broke, rid = _stream(client, create, body, options)
            break
        except Exception as error:
            said = any(word in str(error) for word in ("stream_options", *(options or ())))
            if not (options and said and getattr(error, "status_code", 0) in (400, 422)):
                raise explain(error, client, model) from error
            notes.append(f"The server refused stream_options={options}: asked again with less.")
    try:
        result = _assemble(events, tokenizer, notes)
    except (TypeError, ValueError, AttributeError) as error:  # the client does not check the types of what comes
        why = (
            f"{client.base_url} sent chunks that are not of OpenAI's form ({error}): is it an OpenAI-compatible server?"
        )
        raise RequestFailed(why) from error
    if broke is not None:
        notes.append(f"The stream broke: {explain(broke, client, model)}")
    elif not all(result.finish_reasons or [None]):
        notes.append("The stream ended without a finish reason: what is shown is what came.")
    endpoint = "/v1/chat/completions" if prompt is None else "/v1/completions"
    complete = broke is None and all(result.finish_reasons or [None])
    return replace(result, model=model, marks=marks, request_id=rid, endpoint=endpoint, complete=complete)


def _stream(client: Any, create: Any, body: dict, options: dict | None):
    """Run the request; returns ([(t, event)], marks, the exception that broke it or None, request id)."""
    rid, marks, events = f"qrecipe-{uuid.uuid4().hex[:16]}", {}, []
    headers = dict(body.get("extra_headers") or {}, **{"X-Request-Id": rid})
    body = dict(body, stream=True, extra_headers=headers) | ({"stream_options": options} if options else {})
    _build_models_once()
    clock, broke = time.perf_counter, None
    with _traced(client, rid, marks):
        start = clock()
        stream = create(**body)
        kind = stream.response.headers.get("content-type", "nothing said of its type")
        try:
            if "event-stream" not in kind:
                raise RequestFailed(f"{client.base_url} answered with {kind} instead of an event stream: is it an "
                                    "OpenAI-compatible server that can stream, and does base_url end in /v1?")  # fmt: skip
            for event in stream:
                if hasattr(event, "choices") or getattr(event, "usage", None) is not None:
                    events.append((clock() - start, event))
        except Exception as error:  # whatever ends a stream early: connection, error event, broken JSON
            if not events:
                raise
            broke = error
        finally:
            stream.close()
    if not events:
        raise RequestFailed(f"{client.base_url} closed the stream without sending a chunk: look at the server's log.")
    return events, {name: t - start for name, t in marks.items()}, broke, rid


@cache
def _build_models_once() -> None:
    """Let the client build its response classes now: it does so at the first chunk it sees, and that takes milliseconds."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletionChunk

    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    delta = {"role": "assistant", "content": "", "tool_calls": [{"index": 0, "function": {"arguments": ""}}]}
    ChatCompletionChunk.construct(id="", choices=[{"index": 0, "delta": delta, "finish_reason": None}], usage=usage)
    Completion.construct(id="", choices=[{"index": 0, "text": "", "finish_reason": None}], usage=usage)


@contextmanager
def _traced(client: Any, rid: str, marks: dict[str, float]) -> Iterator[None]:
    """Note when the HTTP client connects, has sent, and sees the headers (its own trace events), where it can say.

    Holds Python's garbage collector back meanwhile: with torch loaded one sweep takes as long as a slow token.
    """
    wanted = {
        "connect_tcp.started": "connecting", "connect_tcp.complete": "connected", "start_tls.complete": "connected",
        "send_request_body.complete": "sent", "receive_response_headers.complete": "headers",
    }  # fmt: skip

    def trace(name: str, _info: dict) -> None:
        if (mark := wanted.get(name.partition(".")[2])) is not None:
            marks[mark] = time.perf_counter()

    def hook(request: Any) -> None:
        if request.headers.get("x-request-id") == rid:
            request.extensions["trace"] = trace

    hooks = getattr(getattr(client, "_client", None), "event_hooks", {}).get("request", [])
    hooks.append(hook)
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        hooks.remove(hook)
        if collected:
            gc.enable()


@dataclass
class _Arrival:
    """One choice of one event: its parts (kind, text), tokens where the server said, finish reason."""

    t: float
    choice: int
    parts: list[tuple[str, str]]
    tokens: int | None
    finish: str | None


def _assemble(events: list[tuple[float, Any]], tokenizer: Any, notes: list[str]) -> Dissection:
    arrivals: list[_Arrival] = []
    tail: list[Chunk] = []
    tools: dict[tuple[int, int], dict[str, str]] = {}
    usage, prompt_tokens, sources, so_far = None, None, set(), Counter()
    for t, event in events:
        choices, counts = event.choices or [], getattr(event, "usage", None)
        if counts is not None:
            prompt_tokens = counts.prompt_tokens if counts.prompt_tokens is not None else prompt_tokens
            if not choices or (usage is None and any(c.finish_reason for c in choices)):
                usage = counts.model_dump(exclude_none=True)
            if not choices:
                tail.append(Chunk(t, "usage", "", 0))
        for choice in choices:
            i, tokens = choice.index or 0, None
            if counts is not None and len(choices) == 1 and counts.completion_tokens is not None:
                tokens, so_far[i] = counts.completion_tokens - so_far[i], counts.completion_tokens
                sources.add("usage of every chunk")
            elif (entries := _token_entries(choice)) is not None:
                tokens = len(entries)
                sources.add("token entries of every chunk")
            arrivals.append(_Arrival(t, i, _parts(choice, tools), tokens, choice.finish_reason))
    total = usage.get("completion_tokens") if usage else None
    counted_by = _count(arrivals, sources, total, tokenizer, notes)
    chunks = sorted([c for a in arrivals for c in _chunks(a)] + tail, key=lambda c: c.t)
    if many := sum(c.tokens > 1 for c in chunks):
        notes.append(f"{many} of {sum(c.tokens > 0 for c in chunks)} chunks carried more than one token: their gap "
                     "is spread over them and marked.")  # fmt: skip
    finish: dict[int, str | None] = {}
    for a in arrivals:
        finish[a.choice] = a.finish or finish.get(a.choice)
    texts = {k: ["".join(c.text for c in chunks if (c.choice, c.kind) == (i, k)) for i in sorted(finish)]
             for k in ("content", "reasoning")}  # fmt: skip
    return Dissection(
        model="", endpoint="", chunks=chunks, usage=usage, prompt_tokens=prompt_tokens, notes=notes, counted_by=counted_by,
        texts=texts["content"], reasonings=[text or None for text in texts["reasoning"]],
        tool_calls=[tools[key] for key in sorted(tools)], finish_reasons=[finish[i] for i in sorted(finish)],
        completion_tokens=total if total is not None else sum(c.tokens for c in chunks),
    )  # fmt: skip


def _parts(choice: Any, tools: dict) -> list[tuple[str, str]]:
    """The (kind, text) parts of one choice; tool calls are also gathered in `tools`."""
    delta = getattr(choice, "delta", None)
    if delta is None:  # /v1/completions
        text = getattr(choice, "text", "") or ""
        return [("content", text)] if text or not choice.finish_reason else []
    parts = []
    if reasoning := getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None):
        parts.append(("reasoning", reasoning))
    if delta.content:
        parts.append(("content", delta.content))
    for call in delta.tool_calls or []:
        entry = tools.setdefault((choice.index or 0, call.index or 0), {"id": "", "name": "", "arguments": ""})
        entry["id"] = call.id or entry["id"]
        if call.function:
            entry["name"] += call.function.name or ""
            entry["arguments"] += call.function.arguments or ""
            parts.append(("tool", (call.function.name or "") + (call.function.arguments or "")))
    if not parts and delta.role and not choice.finish_reason:
        parts.append(("role", ""))
    return parts


def _token_entries(choice: Any) -> list | None:
    """Token ids or log-probabilities that came with a chunk, if the request asked for them."""
    logprobs = getattr(choice, "logprobs", None)
    found = [getattr(choice, "token_ids", None), *(getattr(logprobs, name, None) for name in ("content", "tokens"))]
    return next((entries for entries in found if entries is not None), None)


def _count(arrivals: list[_Arrival], sources: set[str], total: int | None, tokenizer: Any, notes: list[str]) -> str:
    """Fill `tokens` of each arrival; returns the source: the server's count, the tokenizer, or shares of the usage."""
    carrying = [a for a in arrivals if any(text for _, text in a.parts)]
    if sources and all(a.tokens is not None for a in carrying):
        for a in arrivals:
            a.tokens = max(0, a.tokens or 0)
        return max(sources)
    texts = ["".join(text for _, text in a.parts) for a in carrying]
    counts, source = [1] * len(texts), "usage, one token a chunk"
    if tokenizer is not None:
        counts, source = [max(1, len(tokenizer.encode(text, add_special_tokens=False))) for text in texts], "tokenizer"
        notes.append(
            "Tokens were counted with the tokenizer, chunk by chunk: the server sent no count with its chunks."
        )
    elif total is None:
        source = "chunks"
        notes.append("No usage and no tokenizer: chunks are counted, and a chunk may hold several tokens.")
    elif texts and total - len(texts) not in (0, 1):
        counts, source = _shares(total, [len(text) for text in texts]), "usage, shared out by length"
        notes.append(f"{total} tokens came in {len(texts)} chunks: shared out by length of text.")
    for a in arrivals:
        a.tokens = 0
    for a, count in zip(carrying, counts, strict=True):
        a.tokens = count
    short = 0 if total is None else total - sum(counts)
    if short == 1 and arrivals and arrivals[-1].finish and not arrivals[-1].parts:
        arrivals[-1].tokens = 1  # the end-of-turn token: counted by the server, without text
    elif short:
        notes.append(f"The usage says {total} tokens, the chunks' text holds {total - short}: tokens without text "
                     "(think tags, end).")  # fmt: skip
    return source


def _shares(total: int, lengths: list[int]) -> list[int]:
    """Whole shares of `total` in proportion to the lengths; what is left goes to the largest remainders."""
    exact = [total * n / sum(lengths) for n in lengths]
    shares = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _chunks(a: _Arrival) -> list[Chunk]:
    """The chunks of one arrival: usually one; two when a delta ends the reasoning and opens the answer."""
    if not a.parts:
        return [Chunk(a.t, "finish" if a.finish else "content", "", a.tokens or 0, a.choice)]
    shares = _shares(a.tokens or 0, [len(text) or 1 for _, text in a.parts])
    return [Chunk(a.t, kind, text, share, a.choice) for (kind, text), share in zip(a.parts, shares, strict=True)]
