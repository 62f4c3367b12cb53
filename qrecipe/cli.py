"""The command line: `qrecipe COMMAND`. Exit codes: 0 good, 1 the answer is "no", 2 bad usage or input."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .checks import CONTROL, check_number, whole_number
from .errors import BadInput, RecipeError, ServerFailed


def number(name: str, help: str, low: float = 1, high: float = 10**8, kind: type = int):
    """An option that takes a number from `low` to `high`; a whole one as `vllm serve` reads it (32k)."""

    def read(text: object) -> float:
        try:
            value = float(text) if kind is float else whole_number(str(text))
        except ValueError:
            value = text
        return check_number(value, f"--{name}", low, high, kind)

    return typer.Option(f"--{name}", parser=read, metavar="NUMBER", help=help)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__)
app.info.context_settings = {"help_option_names": ["-h", "--help"]}
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Engine = Annotated[str, typer.Option(help="auto, cpu or gpu")]
PORT = "port", "the server's port", 1024, 65535


def main() -> None:
    """Run the command line; an error meant for a person is one line on stderr."""
    try:
        words = sys.argv[1:]
        if words[:1] == ["size"]:  # read without typer's parser, which takes longer than the answer
            from .size_command import predict

            sys.exit(predict(words[1:]))
        code = typer.main.get_command(app).main(joined(words) or ["--help"], "qrecipe", standalone_mode=False)
        sys.exit(code if words else 2)
    except RecipeError as e:
        print(f"qrecipe: {CONTROL.sub('?', str(e))}", file=sys.stderr)
        sys.exit(e.exit_code)
    except typer.BadParameter.__base__ as e:  # what the parser refuses
        commands = typer.main.get_command(app).commands
        name, known = ("qrecipe", ", ".join(commands)) if words[0] not in commands else (f"qrecipe {words[0]}", "")
        mend = f"the commands are {known}" if known else f"`{name} --help` lists what it takes"
        if words[0] in ("stop", "status", "serve") and (port := next((w for w in words if w.isdigit()), "")):
            mend = f"a port is given as --port {port}; {mend}"
        print(f"{name}: {' '.join(e.format_message().split()).rstrip('.')}; {mend}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("qrecipe: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def joined(args: list[str]) -> list[str]:
    """`-p NAME VALUE` with NAME=VALUE as the one word that an option of typer can take."""
    words, out = iter(args), []
    for word in words:
        out.append(word)
        if word == "-p" and args[0] == "run":
            name, value = next(words, ""), next(words, "--")
            if not name or name.startswith("-") or value.startswith("--"):
                raise BadInput(f"-p {name}: a name and its value are expected, as in `-p port 8001`")
            out.append(f"{name}={value}")
    return out


def show(data, as_json: bool, lines) -> None:
    """Print `data` as JSON, or the lines made for a person."""
    print(json.dumps(data, indent=1, ensure_ascii=False) if as_json else CONTROL.sub("?", "\n".join(lines)))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="auto, a model folder, or a hub id")] = "auto",
    engine: Engine = "auto",
    port: Annotated[int, number(*PORT)] = 8000,
    host: Annotated[str, typer.Option(help="where it listens; beyond this machine only with a key")] = "127.0.0.1",
    weights: Annotated[str, typer.Option(help="real, or dummy: the exact shape with random weights")] = "real",
    max_model_len: Annotated[int, number("max-model-len", "the longest request in tokens", 16)] = 32768,
    max_num_seqs: Annotated[int | None, number("max-num-seqs", "requests worked on at once")] = None,
    gpu_memory_utilization: Annotated[
        float, number("gpu-memory-utilization", "share of the card's memory", 0.01, 1, float)
    ] = 0.90,
    tensor_parallel_size: Annotated[
        int | None, number("tensor-parallel-size", "every layer split over so many ranks")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, number("pipeline-parallel-size", "layers dealt out to so many stages")
    ] = None,
    data_parallel_size: Annotated[int | None, number("data-parallel-size", "so many copies of the engine")] = None,
    nodes: Annotated[int, number("nodes", "hosts that the ranks spread over, joined by Ray")] = 1,
    head: Annotated[str, typer.Option(help="with --nodes: HOST:PORT of the Ray head")] = "",
    keep: Annotated[bool, typer.Option("--keep", help="leave it running until 'qrecipe stop'")] = False,
    new_key: Annotated[bool, typer.Option("--new-key", help="make an API key, in a file only you can read")] = False,
    allowed_media_domains: Annotated[
        str | None, typer.Option("--images-from", help="the one domain that pictures may be fetched from")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code of the model's folder")
    ] = False,
    extra: Annotated[list[str], typer.Option(help="one more word of vllm serve; may be repeated")] = [],  # noqa: B006
) -> None:
    """Start the book's server, wait until it answers; without --keep it ends with this command (Ctrl-C)."""
    given = {name: value for name, value in locals().items() if value is not None}
    from .chapter import open_chapter
    from .progress import StartProgress
    from .recipe import ServeRecipe
    from .serving import OPEN_PATHS, Server, read_state
    from .supervisor import ENDED

    chapter = open_chapter("serve", {name: given.pop(name) for name in ("engine", "model", "port", "weights")})
    flags = {name: value for name, value in given.items() if name in ServeRecipe.__dataclass_fields__}
    recipe = chapter.recipe(**flags | {"extra": tuple(extra)})
    if (nodes > 1) != bool(head):
        raise BadInput("several hosts need both: --nodes with their number, and --head with HOST:PORT of the Ray head")
    if nodes > 1:
        if recipe.ranks % nodes or recipe.ranks // nodes % (recipe.tensor_parallel_size or 1):
            raise BadInput(
                f"{nodes} nodes: {recipe.ranks} rank{'s do' if recipe.ranks > 1 else ' does'} not spread evenly over them with tensor parallelism inside each; let the pipeline- or data-parallel size be a multiple of {nodes}"
            )
        recipe = recipe.with_(distributed_executor_backend="ray", env=recipe.env | {"RAY_ADDRESS": head})
    if trust_remote_code:
        print("trust-remote-code is on: Python code of the model's folder will run on this machine as you")
    command, progress = [recipe.command()], StartProgress(chapter.engine)

    def told(seconds: float | None, log: Path) -> None:
        while command:  # once, and only where nothing was refused
            print(command.pop(), flush=True)
        progress(seconds, log)

    server = Server.start(recipe, keep=keep, new_key=new_key, on_progress=told)
    print(f"{server.base_url} serves {server.model}; log {server.log}")
    if server.api_key != "EMPTY":
        print(f"its API key is in {server.folder / 'api-key'}; open without it: {OPEN_PATHS}")
    if keep:
        return
    print("Ctrl-C stops it.", flush=True)
    try:
        while (state := read_state(server.folder)).get("status", "ready") not in ENDED:
            time.sleep(0.5)
        raise RecipeError(f"the server has ended: {state.get('why')}; log {server.log}")
    finally:
        server.leave(wait=45)


@app.command()
def status(
    port: Annotated[int | None, number("port", "only the server on this port", *PORT[2:])] = None, as_json: Json = False
) -> None:
    """The servers that this book started; exit 1 when none runs."""
    from . import serving

    found = serving.status(port)
    told = [f"port {s['port']}: {s['status']}, {s['owners']} owners, {s['model']}, log {s['log']}" for s in found]
    show(found, as_json, told or ["no server"])
    raise typer.Exit(0 if any(s["status"] in ("starting", "ready") for s in found) else 1)


@app.command()
def stop(
    port: Annotated[int, number(*PORT)] = 8000,
    every: Annotated[bool, typer.Option("--all", help="every server that this book started")] = False,
) -> None:
    """Stop the server on this port, whoever uses it, and wait until it is gone."""
    from . import serving
    from .supervisor import ENDED

    left = []
    for one in [s["port"] for s in serving.status()] if every else [port]:
        try:
            before, state = serving.status(one), serving.stop(one)
        except ServerFailed as e:  # one that cannot be ended must not save the others
            left.append(str(e))
            continue
        running = before and before[0]["status"] not in ENDED
        last = f" (last: {state['status']})" if state else ""
        others = [str(s["port"]) for s in serving.status() if s["status"] not in ENDED]
        last += f"; on {', '.join(others)} one does: --port or --all" if others else ""
        print(f"stopped the server on port {one}" if running else f"no server runs on port {one}{last}")
    if left:
        raise ServerFailed("; ".join(left))


@app.command()
def run(
    notebooks: Annotated[list[str], typer.Argument(help="03, 03_serve or a path; all when none is named")] = [],  # noqa: B006
    p: Annotated[list[str], typer.Option("-p", help="a chapter's parameter", metavar="NAME VALUE")] = [],  # noqa: B006
    out: Annotated[str | None, typer.Option(help="the run folder; runs/STAMP when not given")] = None,
    engine: Engine = "auto",
    weights: Annotated[str, typer.Option(help="real or dummy")] = "real",
    timeout: Annotated[float, number("timeout", "limit for the whole run in seconds", kind=float)] = 5400,
    cell_timeout: Annotated[float, number("cell-timeout", "limit for one cell in seconds", kind=float)] = 1500,
    log: Annotated[str, typer.Option(help="the log of the server at base_url, for chapters that read one")] = "",
    publish: Annotated[str, typer.Option(help="also a stamped copy in this new folder that names no machine")] = "",
    note: Annotated[str, typer.Option(help="kept in run.json: what else its reader must know")] = "",
) -> None:
    """Run the book (or some chapters) with papermill, judge each chapter, write the report."""
    from .book import run_book
    from .chapter import server_url

    given = {"engine": engine, "weights": weights} | dict(map(parameter, p))
    if log and not os.path.isfile(log):
        raise BadInput(f"--log {log}: there is no such file")
    if log and not server_url(given):
        raise BadInput(
            "--log is that of a server at base_url, and none is given: `-p log FILE` lets chapter 04 read a log"
        )
    if log:
        os.environ["QRECIPE_LOG"] = os.path.abspath(log)
    usual = (signal.SIG_DFL, signal.default_int_handler)
    ends = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) in usual]

    def interrupt(*_) -> None:
        """All end the run as Ctrl-C does, the first alone: the server is stopped and the report written then."""
        for number in ends:
            signal.signal(number, signal.SIG_IGN)
        os.write(2, b"interrupted: ending chapter and server, writing the report\n")
        raise KeyboardInterrupt

    for number in ends:
        signal.signal(number, interrupt)
    limits = {"cell_limit": cell_timeout, "run_limit": timeout}
    passed, folder = run_book(notebooks, given, out=out, publish_in=publish, note=note, **limits)
    print(f"{'no chapter failed' if passed else 'NOT all chapters passed'}; report: {folder / 'index.html'}")
    raise typer.Exit(0 if passed else 1)


def parameter(text: str) -> tuple[str, object]:
    """The value of NAME=VALUE read as JSON where it is JSON, else as text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads({"True": "true", "False": "false"}.get(value, value))
    except ValueError:
        return name, value


@app.command()
def report(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="run folders, or folders of run folders")],
    out: Annotated[str, typer.Option(help="where nights.html and nights.json go; runs/report when not given")] = "",
    bound: Annotated[
        float,
        number("bound", "a change for the worse by more than this share (0.1 is 10 %) is a regression", 0, 1, float),
    ] = 0.10,
    as_json: Json = False,
) -> None:
    """Runs side by side; exit 1 when the latest stands out for the worse."""
    from .nights import compare, write_nights
    from .paths import runs_dir, writable

    found = compare([Path(f) for f in folders], bound)
    page = write_nights(writable(Path(out) if out else runs_dir() / "report"), found)
    lines = [f"note: {n}" for n in found["notes"]] + [f"changed: {c}" for c in found["changed"]]
    lines += [f"regression: {r}" for r in found["regressions"]] or ["no regression"]
    lines = [line.replace("\n", "?") for line in lines]  # names that a foreign file has chosen
    show(found, as_json, [*lines, f"{len(found['nights'])} runs; report: {page}"])
    raise typer.Exit(1 if found["regressions"] else 0)


@app.command("teaching-model")
def teaching_model(directory: Annotated[str, typer.Argument(help="a new or an empty folder")]) -> None:
    """Assemble the teaching model's folder (config, tokenizer, weights) in DIRECTORY."""
    from .paths import fresh_folder
    from .teaching_model import build

    print(build(fresh_folder(directory)))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def size(ctx: typer.Context) -> None:
    """Predict what vLLM's start-up log will say of memory; exit 1 when it does not fit. Options: qrecipe size --help"""
    from .size_command import predict

    raise typer.Exit(predict(ctx.args))


@app.command("log")
def read(
    file: Annotated[str, typer.Argument(help="a vLLM log, also .gz; - reads a pipe")], as_json: Json = False
) -> None:
    """The memory profile in a start-up log, or the failure and its mend; exit 1 when the start failed."""
    from .startup_log import read_log

    facts = read_log(file).as_dict()
    failure = facts.get("failure")
    plain = [f"{k:24} {v}" for k, v in facts.items() if v is not None and not isinstance(v, (list, dict))]
    words = {"failure": "text", "cause": "cause", "mend": "mend"}
    told = [f"{word + ':':8} {failure[key]}" for word, key in words.items()] if failure else []
    if not failure and facts["ready"] is False:
        told = ["the log ends before the server was ready, and names no failure"]
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
    prompt: Annotated[
        str, typer.Option(help="the question")
    ] = "Explain in one sentence why KV cache memory grows with context length.",
    model: Annotated[str, typer.Option(help="a served name; the first that /v1/models lists when not given")] = "",
    image: Annotated[list[str] | None, typer.Option(help="a picture to send along; may be repeated")] = None,
    max_tokens: Annotated[int, number("max-tokens", "the longest answer, thinking included")] = 256,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="whether it thinks first")] = False,
    as_json: Json = False,
) -> None:
    """One request's timeline: TTFT, ITL, TPOT and throughput, each with its formula; exit 1 when it broke off."""
    from openai import OpenAI

    from .errors import RequestFailed
    from .request import dissect as take_apart
    from .serving import Server
    from .start_checks import given_key
    from .vision import picture_message

    key = given_key() or "EMPTY"
    if not model:
        server = Server.attach(url)
        model, key = server.model, server.api_key
    client = OpenAI(base_url=url.rstrip("/"), api_key=key)
    message = picture_message(image, prompt) if image else {"role": "user", "content": prompt}
    ask = {"model": model, "messages": [message], "max_tokens": max_tokens}
    try:
        found = take_apart(client, extra_body={"chat_template_kwargs": {"enable_thinking": thinking}}, **ask)
    except RequestFailed as why:
        if "chat_template_kwargs" not in str(why):
            raise
        found = take_apart(client, **ask)
        found.notes.append("The server refused chat_template_kwargs and was asked without: --thinking does nothing.")
    rows = [f"{r.name:18} {r.value:>9.4g} {r.unit:9} {r.formula}" for r in found.table()]
    words = [found.reasoning or "", *found.texts, *map(str, found.tool_calls)]
    show(found.as_dict(), as_json, [*words, "", *rows, *found.notes])
    raise typer.Exit(0 if found.complete else 1)


if __name__ == "__main__":
    main()
