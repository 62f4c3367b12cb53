"""Every command that README, pages and notebooks tell can be typed: it exists, and so do its options, chapters and parameters."""

import re
import shlex

import nbformat
import pytest
import typer
from conftest import ROOT

from qrecipe.book import find_notebooks, known_parameters, sort_parameters
from qrecipe.cli import app, joined, main, parameter
from qrecipe.errors import BadInput
from qrecipe.size_command import parser

COMMANDS = typer.main.get_command(app).commands
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.md"))]


def told() -> list[tuple[str, str]]:
    """(file, command): whole lines of code blocks and of what cells print, and what stands between backticks in prose."""
    texts = [(p.name, p.read_text()) for p in PAGES]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        texts += [(path.name, cell.source) for cell in nbformat.read(path, 4).cells]
    found = []
    for name, text in texts:
        spans = re.findall(r"(?m)^ *((?:qrecipe|papermill) [^\n`]*)", text) + re.findall(r"`([^`]*)`", text)
        for line in spans:
            for part in re.split(r" ; | && ", re.sub(r"\s+#.*|\"\"\"$", "", " ".join(line.split()))):
                if re.match(r"(qrecipe [a-z]|papermill \d)", part):
                    found.append((name, part.replace("{url}", "http://127.0.0.1:8000/v1")))
    return sorted(set(found))


def check(line: str) -> None:
    """Raises where the command line could not be typed as it stands; an option at its end may lack its value."""
    words = shlex.split(line)
    if words[0] == "papermill":
        path = ROOT / "notebooks" / words[1]
        given = [words[i + 1] for i, word in enumerate(words) if word == "-p"]
        assert path.is_file() and set(given) <= known_parameters(path).keys(), line
    elif words[1] == "size":
        parser().parse_args(words[2:])
    else:
        command, args = COMMANDS[words[1]], joined(words[1:])[1:]
        options = {o: param for param in command.params for o in param.opts + param.secondary_opts}
        assert {w for w in args if w.startswith("-")} <= options.keys(), line
        if args and args[-1] in options and not options[args[-1]].is_flag:
            args.pop()
        context = command.make_context(words[1], args, resilient_parsing=words[1] == "report")
        if words[1] == "run":
            sort_parameters(find_notebooks(context.params["notebooks"]), dict(map(parameter, context.params["p"])))


@pytest.mark.parametrize("name, line", told())
def test_a_command_that_is_told_can_be_typed(name, line):
    check(line)


def test_the_commands_are_found_and_a_wrong_one_is_seen():
    lines = [line for _, line in told()]
    assert {line.split()[1] for line in lines if line.startswith("qrecipe")} >= COMMANDS.keys() - {"teaching-model"}
    assert sum(line.startswith("papermill") for line in lines) >= 3
    for wrong in ("qrecipe run 03 04 -p max_tokens 64", "qrecipe run 12", "qrecipe log a b", "qrecipe size X --gpus 2"):
        with pytest.raises((BadInput, typer.BadParameter.__base__)):
            check(wrong)
    for wrong in ("papermill 03_serve.ipynb o.ipynb -p max_tokens 8", "qrecipe serve --no-such"):
        with pytest.raises(AssertionError):
            check(wrong)


def test_a_log_cannot_steer_the_terminal(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.log").write_text(
        "INFO vLLM API server version 0.27.0\nValueError: \x1b]0;title\x07 \x9b31m \x1b[31mred\n"
    )
    monkeypatch.setattr("sys.argv", ["qrecipe", "log", str(tmp_path / "x.log")])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    assert "title" in said and not {"\x1b", "\x07", "\x9b"} & set(said)
