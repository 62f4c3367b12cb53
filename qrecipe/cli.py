"""The command line: `qrecipe COMMAND`. Exit codes: 0 good, 1 the answer is "no", 2 bad usage or input."""

import json
import sys
from typing import Annotated

import typer

from .errors import BadInput, RecipeError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__
)
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Port = Annotated[int, typer.Option(help="the server's port")]


def main() -> None:
    """Run the command line; an error meant for a person is one line on stderr."""
    try:
        if sys.argv[1:2] == ["size"]:  # read without typer's parser, which takes longer than the answer
            from .size_command import predict

            sys.exit(predict(sys.argv[2:]))
        app(args=fold_parameters(sys.argv[1:]))
    except RecipeError as e:
        print(f"qrecipe: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        print("qrecipe: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def fold_parameters(args: list[str]) -> list[str]:
    """`-p NAME VALUE` as one option value, NAME=VALUE, which typer can take."""
    out, rest = [], list(args)
    while rest:
        word = rest.pop(0)
        if word == "-p" and len(rest) >= 2 and "=" not in rest[0]:
            out += ["-p", f"{rest.pop(0)}={rest.pop(0)}"]
        else:
            out.append(word)
    return out


def show(data, as_json: bool, lines) -> None:
    """Print `data` as JSON, or the lines made for a person."""
    if as_json:
        print(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        for line in lines:
            print(line)


def recipe_of(
    engine: str,
    model: str,
    port: int,
    weights: str,
    max_model_len: int,
    gpu_memory_utilization: float,
    extra: list[str],
):
    """The ServeRecipe of an engine and a few flags."""
    from .chapter import Chapter, check_values

    parameters = {"engine": engine, "model": model, "port": port, "weights": weights}
    check_values(parameters)
    from .layers import choose_engine, gather

    chosen, reason = choose_engine(gather(), engine)
    chapter = Chapter("serve", chosen, reason, parameters, "", {})
    return chosen, chapter.recipe(
        max_model_len=max_model_len, gpu_memory_utilization=gpu_memory_utilization, extra=tuple(extra)
    )


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="auto, a model folder, or a hub id")] = "auto",
    engine: str = "auto",
    port: Port = 8000,
    weights: Annotated[str, typer.Option(help="real, or dummy: the exact shape with random weights")] = "real",
    max_model_len: int = 32768,
    gpu_memory_utilization: float = 0.90,
    keep: Annotated[bool, typer.Option("--keep", help="leave it running until 'qrecipe stop'")] = False,
    extra: Annotated[
        list[str] | None, typer.Option("--extra", help="one more word of vllm serve's command line; may be repeated")
    ] = None,
) -> None:
    """Start the book's server, wait until it answers; without --keep it ends with this command (Ctrl-C)."""
    from .progress import StartProgress
    from .serving import Server, read_state
    from .supervisor import ENDED

    chosen, recipe = recipe_of(engine, model, port, weights, max_model_len, gpu_memory_utilization, extra or [])
    print(recipe.command())
    server = Server.start(recipe, keep=keep, on_progress=StartProgress(chosen))
    print(f"{server.base_url} serves {server.model}; log {server.log}")
    if keep:
        return
    print("Ctrl-C stops it.")
    import time

    try:
        while read_state(server.folder)["status"] not in ENDED:
            time.sleep(0.5)
        raise RecipeError(f"the server has ended: {read_state(server.folder).get('why')}")
    finally:
        server.leave(wait=45)


@app.command()
def status(
    port: Annotated[int | None, typer.Option(help="only the server on this port")] = None, as_json: Json = False
) -> None:
    """The servers that this book started; exit 1 when none runs."""
    from . import serving

    found = serving.status(port)
    show(
        found,
        as_json,
        [f"port {s['port']}: {s['status']}, {s['owners']} owners, {s['model']}, log {s['log']}" for s in found]
        or ["no server"],
    )
    if not any(s["status"] in ("starting", "ready") for s in found):
        raise typer.Exit(1)


@app.command()
def stop(port: Port = 8000) -> None:
    """Stop the server on this port, whoever uses it, and wait until it is gone."""
    from . import serving

    before = serving.status(port)
    state = serving.stop(port)
    running = before and before[0]["status"] not in ("stopped", "failed", "died")
    print(
        f"stopped the server on port {port}"
        if running
        else f"no server runs on port {port}" + (f" (last: {state['status']})" if state else "")
    )


@app.command()
def run(
    notebooks: Annotated[
        list[str] | None, typer.Argument(help="03, 03_serve or a path; all when none is named")
    ] = None,
    p: Annotated[
        list[str] | None,
        typer.Option("-p", help="a chapter's parameter as NAME VALUE or NAME=VALUE", metavar="NAME VALUE"),
    ] = None,
    out: Annotated[str | None, typer.Option(help="the run folder; runs/STAMP when not given")] = None,
    engine: Annotated[str, typer.Option(help="auto, cpu or gpu")] = "auto",
    weights: Annotated[str, typer.Option(help="real or dummy")] = "real",
    timeout: Annotated[float, typer.Option(help="limit for the whole run in seconds")] = 5400,
    cell_timeout: Annotated[float, typer.Option(help="limit for one cell in seconds")] = 1500,
    publish: Annotated[
        str | None, typer.Option(help="also a stamped copy in this new folder that names no machine")
    ] = None,
    note: Annotated[str, typer.Option(help="kept in run.json: what else its reader must know")] = "",
) -> None:
    """Run the book (or some chapters) with papermill, judge each chapter, write the report."""
    from .book import run_book

    if timeout <= 0 or cell_timeout <= 0:
        raise BadInput("--timeout and --cell-timeout are seconds and must be above 0")
    given = dict(parameter(text) for text in p or [])
    passed, folder = run_book(
        notebooks or (),
        parameters=given,
        out=out,
        engine=engine,
        weights=weights,
        run_limit=timeout,
        cell_limit=cell_timeout,
        publish_in=publish,
        note=note,
        say=lambda text: print(text, flush=True),
    )
    print(f"{'no chapter failed' if passed else 'NOT all chapters passed'}; report: {folder / 'index.html'}")
    raise typer.Exit(0 if passed else 1)


def parameter(text: str) -> tuple[str, object]:
    """NAME=VALUE with the value read as JSON where it is JSON, else as text."""
    name, found, value = text.partition("=")
    if not found or not name.isidentifier():
        raise BadInput(f"-p {text!r}: expected NAME VALUE, for example -p port 8001")
    try:
        return name, json.loads({"True": "true", "False": "false"}.get(value, value))
    except ValueError:
        return name, value


@app.command("teaching-model")
def teaching_model(directory: str) -> None:
    """Assemble the teaching model's folder (config, tokenizer, weights) in DIRECTORY."""
    from pathlib import Path

    from .teaching_model import build

    folder = Path(directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists and is not an empty folder: name another one, or remove it")
    print(build(folder))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def size(ctx: typer.Context) -> None:
    """Predict what vLLM's start-up log will say of memory; exit 1 when it does not fit. Options: qrecipe size --help"""
    from .size_command import predict

    raise typer.Exit(predict(ctx.args))


@app.command("log")
def read(file: Annotated[str, typer.Argument(help="a vLLM log, also .gz")], as_json: Json = False) -> None:
    """The memory profile in a start-up log, or the failure and its mend; exit 1 when the start failed."""
    from .startup_log import read_log

    facts = read_log(file).as_dict()
    failure = facts.get("failure")
    plain = [f"{k:24} {v}" for k, v in facts.items() if v is not None and not isinstance(v, (list, dict))]
    told = (
        [f"failure: {failure['text']}", f"cause:   {failure['cause']}", f"mend:    {failure['mend']}"]
        if failure
        else []
    )
    show(facts, as_json, plain + told)
    raise typer.Exit(1 if failure else 0)


@app.command()
def doctor(as_json: Json = False) -> None:
    """The layers from driver to transformers; exit 1 with the first broken one and its mend."""
    from . import layers

    raise typer.Exit(layers.doctor(as_json=as_json))


@app.command()
def dissect(
    url: Annotated[str, typer.Option(help="an OpenAI-compatible server")] = "http://127.0.0.1:8000/v1",
    prompt: str = "Explain in one sentence why KV cache memory grows with context length.",
    image: Annotated[str | None, typer.Option(help="a picture to send along")] = None,
    max_tokens: int = 256,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking")] = False,
    as_json: Json = False,
) -> None:
    """One request's timeline: TTFT, ITL, TPOT and throughput, each with its formula."""
    from openai import OpenAI

    from .request import dissect as take_apart
    from .serving import Server

    server = Server.attach(url)
    content: object = prompt
    if image:
        from .vision import check_image, data_url

        content = [
            {"type": "image_url", "image_url": {"url": data_url(check_image(image))}},
            {"type": "text", "text": prompt},
        ]
    client = OpenAI(base_url=server.base_url, api_key=server.api_key)
    extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
    found = take_apart(
        client,
        model=server.model,
        messages=[{"role": "user", "content": content}],
        max_tokens=max_tokens,
        extra_body=extra,
    )
    rows = [f"{r[0]:18} {'-' if r[1] is None else f'{r[1]:.4g}':>9} {r[2]:9} {r[3]}" for r in found.table()]
    show(found.as_dict(), as_json, [found.reasoning or "", found.text, "", *rows, *found.notes])
    raise typer.Exit(0 if found.complete else 1)


if __name__ == "__main__":
    main()
