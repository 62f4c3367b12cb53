"""What can be wrong with a request: refused here before it is sent, or the server's refusal put into one sentence.

The sentences for 400, 401, 404 and 500 follow vLLM 0.27.0's own words; it sends no 429, which comes from a proxy before it
or from another vendor's server.
"""

import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from .checks import check_number
from .errors import BadInput, RequestFailed

TABLE = tomllib.loads((Path(__file__).parent / "data" / "request_errors.toml").read_text(encoding="utf-8"))
COUNTS = re.compile(
    r"(?:(?:requested )?(?P<asked>\d+) output tokens and your prompt contains|Input length \(|requested) ?"
    r"(?P<least>at least )?(?P<held>\d+) ?(?P<letters>characters)?"
)


def check_request(client: Any, model: Any, messages: Any, prompt: Any, max_tokens: Any, temperature: Any,
                  extra_body: dict | None, params: dict) -> None:  # fmt: skip
    """Raise BadInput for what cannot be sent: parts missing, numbers out of range, names the client does not know."""
    create = client.chat.completions.create if prompt is None else client.completions.create
    unknown = ", ".join(sorted(set(params) - set(inspect.signature(create).parameters)))
    parts = messages if isinstance(messages, list) else []
    roles = [m.get("role") if isinstance(m, dict) else getattr(m, "role", None) for m in parts]
    for wrong, why in [
        (type(client).__name__.startswith("Async"), "the client is asynchronous: give an openai.OpenAI, whose stream is read on one clock."),
        (not (isinstance(model, str) and model.strip()), f"model is {model!r}: give the name that /v1/models lists, for instance 'qwen3.5-4b'."),
        ((messages is None) == (prompt is None), "give either messages (chat) or prompt (completion), not both and not neither."),
        (messages is not None and not (roles and all(roles)), "messages must be a list of at least one {'role': ..., 'content': ...}."),
        (prompt is not None and not (isinstance(prompt, (str, list)) and prompt), "prompt must be a text or a list of token ids, and not empty."),
        (not isinstance(extra_body, dict | None), f"extra_body is {type(extra_body).__name__}: it must be a dict of fields the server adds."),
        (params.keys() & {"stream", "stream_options"}, "stream and stream_options are set here: a dissected request always streams and asks for usage."),
        (unknown, f"{unknown}: no parameter of the openai client; what the server adds goes into extra_body."),
    ]:  # fmt: skip
        if wrong:
            raise BadInput(why)
    for name, value in {"max_tokens": max_tokens, "temperature": temperature, **params, **(extra_body or {})}.items():
        limits = TABLE["ranges"].get(name)
        if limits and value is not None and type(value).__name__ not in ("Timeout", "NotGiven", "Omit"):
            low, high, kind = limits
            check_number(value, name, low, high, int if kind == "int" else float)


def served_models(client: Any) -> list[str]:
    """Names that /v1/models lists; empty when it cannot be read."""
    try:
        return [m.id for m in client.with_options(max_retries=0, timeout=5).models.list()]
    except Exception:  # it is asked only to word another error
        return []


def explain(error: Exception, client: Any, model: str) -> RequestFailed:
    """One sentence for what a client or server raised: what was found and what mends it."""
    return error if isinstance(error, RequestFailed) else RequestFailed(_sentence(error, client, model))


def refusal(reply: Any) -> RequestFailed:
    """One sentence for a reply (httpx) by which the server refused a request."""
    said = _said(RequestFailed(reply.json()["error"]["message"]))
    return RequestFailed(_refused(said, reply.status_code))


def _sentence(error: Exception, client: Any, model: str) -> str:
    base, said, name = str(client.base_url).rstrip("/"), _said(error), type(error).__name__
    status, cause = getattr(error, "status_code", None) or 0, error.__cause__ or error
    if status in (400, 413, 422) or ("local files" in said and status not in (401, 403, 404, 429)):  # file://: a 500
        return _refused(said, status)
    served = served_models(client) if status == 404 else []
    wait = getattr(getattr(error, "response", None), "headers", {}).get("retry-after")
    connection = name == "APIConnectionError"
    unmade = "refused" in str(cause) or type(cause).__name__ in ("ConnectError", "ConnectTimeout")
    cases = {
        "other model": served and model not in served,
        "no such address": status == 404,
        "key": status in (401, 403),
        "limit": status == 429,
        "server failed": status >= 500,
        "silent": name == "APITimeoutError",
        "nothing answers": connection and unmade,
        "broken": connection,
        "no JSON": isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
        or name == "APIResponseValidationError",
    }
    text = TABLE["said"][next((case for case, holds in cases.items() if holds), "other")]
    values = {"base": base, "said": said, "status": status, "cause": cause, "wait": f"{wait} s " if wait else ""}
    return text.format(model=model, served=", ".join(map(repr, served)), **values)


def _said(error: Exception) -> str:
    """The server's own message, without the client's wrapping."""
    body = getattr(error, "body", None)
    body = body.get("error", body) if isinstance(body, dict) else body
    message = body.get("message", body.get("detail")) if isinstance(body, dict) else None
    text = str(message or getattr(error, "message", None) or error or type(error).__name__)
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= 300 else text[:297] + "..."


def _refused(said: str, status: int) -> str:
    """vLLM 0.27.0's own words for what does not fit, with both numbers and the mend; other words as they are."""
    found, text = next((f, row["text"]) for row in TABLE["refused"] if (f := re.search(row["words"], said)))
    values = {"said": said, "status": status} | found.groupdict()
    if "{prompt}" in text:
        values |= _too_long(said, int(found["limit"]))
    return text.format(**values)


def _too_long(said: str, limit: int) -> dict[str, Any]:
    """What was asked for, how long the prompt is, and the mend: vLLM counts a prompt only as far as it must."""
    found = COUNTS.search(said)
    asked, least, held, letters = found.group("asked", "least", "held", "letters") if found else (None,) * 4
    asked, room, mend = int(asked or 0), limit - int(held or 0), "shorten the prompt"
    unit = "characters, too many for any" if letters else "tokens"
    if least:  # it stopped counting at the limit
        mend += ", ask for less with max_tokens"
    elif letters and asked >= limit:  # no room for any prompt: it was not counted
        unit, mend = "characters", "ask for less with max_tokens"
    elif not letters and 0 < room < asked:
        mend = f"ask for at most {room} with max_tokens"
    return {"prompt": f"{least or ''}{held or 0} {unit}", "asked": asked, "mend": mend}
