"""What can be wrong with a request: refused here before it is sent, or the server's refusal put into one sentence."""

from __future__ import annotations

import inspect
import json
import math
import re
from typing import Any

from .errors import BadInput, RequestFailed

# name: (lowest, highest, lowest allowed itself, whole numbers only)
_RANGES = {
    "max_tokens": (1, math.inf, True, True), "max_completion_tokens": (1, math.inf, True, True),
    "n": (1, math.inf, True, True), "temperature": (0, math.inf, True, False), "top_p": (0, 1, False, False),
    "min_p": (0, 1, True, False), "top_k": (-1, math.inf, True, True), "presence_penalty": (-2, 2, True, False),
    "frequency_penalty": (-2, 2, True, False), "repetition_penalty": (0, math.inf, False, False),
    "timeout": (0, math.inf, False, False), "min_tokens": (0, math.inf, True, True),
}  # fmt: skip


def check_number(name: str, value: Any) -> None:
    """Raise BadInput when a request parameter lies outside what any server takes."""
    if name not in _RANGES or value is None or type(value).__name__ in ("Timeout", "NotGiven", "Omit"):
        return
    low, high, closed, whole = _RANGES[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if (
        is_number
        and not (whole and value != int(value))
        and (low <= value if closed else low < value)
        and value <= high
    ):
        return
    kind = "a whole number" if whole else "a number"
    bound = f"{'of at least' if closed else 'above'} {low}" + (f" and at most {high}" if high < math.inf else "")
    raise BadInput(f"{name} is {value!r}: it must be {kind} {bound}.")


def check_request(client: Any, model: Any, messages: Any, prompt: Any, max_tokens: Any, temperature: Any,
                  extra_body: dict | None, params: dict) -> None:  # fmt: skip
    """Raise BadInput for what cannot be sent: parts missing, numbers out of range, names the client does not know."""
    if type(client).__name__.startswith("Async"):
        raise BadInput("the client is asynchronous: give an openai.OpenAI, whose stream is read on one clock.")
    if not (isinstance(model, str) and model.strip()):
        raise BadInput(f"model is {model!r}: give the name that /v1/models lists, for instance 'qwen3.5-4b'.")
    if (messages is None) == (prompt is None):
        raise BadInput("give either messages (chat) or prompt (completion), not both and not neither.")
    roles = (
        [m.get("role") if isinstance(m, dict) else getattr(m, "role", None) for m in messages]
        if isinstance(messages, list)
        else []
    )
    if messages is not None and not (roles and all(roles)):
        raise BadInput("messages must be a list of at least one {'role': ..., 'content': ...}.")
    if prompt is not None and (not isinstance(prompt, (str, list)) or not prompt):
        raise BadInput("prompt must be a text or a list of token ids, and not empty.")
    if extra_body is not None and not isinstance(extra_body, dict):
        raise BadInput(f"extra_body is {type(extra_body).__name__}: it must be a dict of fields the server adds.")
    if "stream" in params or "stream_options" in params:
        raise BadInput("stream and stream_options are set here: a dissected request always streams and asks for usage.")
    create = client.chat.completions.create if prompt is None else client.completions.create
    unknown = sorted(set(params) - set(inspect.signature(create).parameters))
    if unknown:
        raise BadInput(
            f"{', '.join(unknown)}: no parameter of the openai client; what the server adds goes into extra_body."
        )
    for name, value in {"max_tokens": max_tokens, "temperature": temperature, **params, **(extra_body or {})}.items():
        check_number(name, value)


def served_models(client: Any) -> list[str]:
    """Names that /v1/models lists; empty when it cannot be read."""
    try:
        return [m.id for m in client.with_options(max_retries=0, timeout=5).models.list()]
    except Exception:  # it is asked only to word another error
        return []


def explain(error: Exception, client: Any, model: str) -> RequestFailed:
    """One sentence for what a client or server raised: what was found and what mends it."""
    return error if isinstance(error, RequestFailed) else RequestFailed(_sentence(error, client, model))


def _sentence(error: Exception, client: Any, model: str) -> str:
    base, said, name = str(client.base_url).rstrip("/"), _said(error), type(error).__name__
    status = getattr(error, "status_code", None) or 0
    if status == 404:
        return _not_found(said, base, client, model)
    if status in (401, 403):
        mend = "pass OpenAI(api_key=...) the key that the server was started with (`vllm serve ... --api-key KEY`)"
        return f"{base} refused the API key ({status}): {mend}."
    if status == 429:
        wait = getattr(getattr(error, "response", None), "headers", {}).get("retry-after")
        return f"{base} is over its request limit (429): wait {f'{wait} s ' if wait else ''}and try again."
    if status in (400, 413, 422):
        return _bad_request(said, status)
    if status >= 500:
        return f"the server failed with {status} ({said}): its own log says why; `qrecipe log FILE` reads it."
    if name == "APITimeoutError":
        return f"{base} was silent longer than the client's timeout: raise timeout= or look whether the server is busy."
    if name == "APIConnectionError":
        cause = error.__cause__ or error
        if "refused" in str(cause) or type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
            return f"nothing answers at {base} ({cause}): start the server (`qrecipe serve`), or mend base_url."
        return f"the connection to {base} broke ({cause}): the server was stopped or died; its log says which."
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) or name == "APIResponseValidationError":
        return (
            f"{base} sent something that is not JSON: is it an OpenAI-compatible server, and does base_url end in /v1?"
        )
    return f"{base} reported an error: {said}."


def _said(error: Exception) -> str:
    """The server's own message, without the client's wrapping."""
    body = getattr(error, "body", None)
    body = body.get("error", body) if isinstance(body, dict) else body
    message = body.get("message") if isinstance(body, dict) else None
    text = " ".join(str(message or getattr(error, "message", None) or error or type(error).__name__).split()).rstrip(
        "."
    )
    return text if len(text) <= 300 else text[:297] + "..."


def _not_found(said: str, base: str, client: Any, model: str) -> str:
    served = served_models(client)
    if served and model not in served:
        return f"the server at {base} has no model {model!r}: it serves {', '.join(map(repr, served))}."
    return f"{base} has no such address (404: {said}): base_url of an OpenAI-compatible server ends in /v1."


def _bad_request(said: str, status: int) -> str:
    if found := re.search(r"maximum context length (?:is |\()(\d+)", said):
        length = int(found[1])
        if chars := re.search(r"(\d+) output tokens and your prompt contains (\d+) characters", said):
            asked, held, unit = int(chars[1]), int(chars[2]), "characters, too many for any"
        elif counts := re.search(r"(\d+) output tokens and your prompt contains (?:at least )?(\d+) input", said):
            asked, held, unit = int(counts[1]), int(counts[2]), "tokens"
        else:
            counts = re.search(r"Input length \((\d+)\)|requested (\d+) tokens", said)
            asked, held, unit = 0, int(next(filter(None, counts.groups()))) if counts else 0, "tokens"
        room = length - held
        if "at least" in said:  # it stopped counting at the limit
            mend = "shorten the prompt, ask for less with max_tokens"
        else:
            mend = (
                f"ask for at most {room} with max_tokens"
                if unit == "tokens" and 0 < room < asked
                else "shorten the prompt"
            )
        at_least = "at least " if "at least" in said else ""
        return (
            f"the prompt ({at_least}{held} {unit}) and max_tokens={asked} do not fit the context of {length} tokens: {mend}, "
            "or serve with a larger --max-model-len."
        )
    if found := re.search(r"max_tokens=(\d+) cannot be greater than max_model_len=\D*(\d+)", said):
        return (
            f"max_tokens={found[1]} is more than the whole context of {found[2]} tokens, and the prompt must fit in as well: ask for less, "
            "or serve with a larger --max-model-len."
        )
    if found := re.search(r"At most (\d+) (\w+)\(s\) may be provided", said):
        return (
            f"the server takes at most {found[1]} {found[2]}(s) in one prompt: send fewer, or serve with "
            f"--limit-mm-per-prompt '{{\"{found[2]}\": N}}'."
        )
    return f"the server refused the request ({status}): {said}."
