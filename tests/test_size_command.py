"""The commands as a user types them, `size` and `log` above all: exit codes, keys, one sentence for what is wrong."""

import gzip
import json
import subprocess
import sys

import pytest
import typer

from qrecipe.cli import app, main
from qrecipe.errors import BadInput
from qrecipe.log_source import recorded
from qrecipe.memory import JSON_KEYS, Flags
from qrecipe.size_command import parser, predict, whole_number

COMMANDS = typer.main.get_command(app).commands
OPTIONS = [(name, p) for name, command in COMMANDS.items() for p in command.params]


@pytest.fixture
def shell(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["qrecipe", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return run


def test_exit_codes_and_keys(shell):
    code, out, _ = shell("size", "Qwen3.5-4B", "--gpu", "RTX 4090", "--max-model-len", "32k", "--json")
    assert code == 0 and tuple(json.loads(out)) == JSON_KEYS
    code, out, _ = shell("size", "Qwen3.5-4B", "--gpu", "RTX 4060")
    assert code == 1 and "fits" in out and "advice:" in out
    assert shell("size", "--help")[0] == 0
    assert "size" in shell("--help")[1]


def test_every_flag_of_the_budget_is_an_option():
    known = {word for action in parser()._actions for word in action.option_strings}
    assert {f"--{name.replace('_', '-')}" for name in Flags.__dataclass_fields__} <= known
    assert {"--gpu", "--gpu-memory", "--available-kv", "--calibrate", "--json", "--no-prefix-caching"} <= known


@pytest.mark.parametrize(
    "words, said",
    [
        (["--max-model-len", "32,768"], "32,768"),
        (["--gpu-memory-utilization", "90%"], "90%"),
        (["--max-modellen", "3"], "--max-modellen"),
        (["--gpu", "A1000"], "nearest"),
        (["--gpu-memory", "24XB"], "24GiB"),
        (["--gpu", "RTX 4090", "--gpu-memory", "40"], "give one of them"),
        (["--nodes", "0"], "nodes is 0"),
        (["--gpu"], "expected one argument"),
        (["--tensor-parallel-size", "5"], "does not divide"),
        (["--tensor-parallel-size", "1.5"], "a whole number such as 2 or 32k is expected"),
        (["--limit-mm-per-prompt", "{"], "JSON"),
        (["--available-kv", "nan"], "available_kv"),
        (["--calibrate", "/no/log"], "vLLM log"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(shell, words, said):
    code, out, err = shell("size", "Qwen3-8B", *words)
    assert code == 2 and not out and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words, said",
    [
        ("status --port", "requires an argument; `qrecipe status --help` lists"),
        ("stop --force", "No such option: --force"),
        ("fly", "No such command 'fly'; the commands are serve, status"),
        ("--fly", "No such option: --fly"),
        ("log", "Missing argument 'file'"),
        ("doctor --json=yes", "does not take a value"),
        ("serve a b", "unexpected extra argument"),
        ("run -p", "a name and its value are expected"),
        ("stop -p 3", "No such option: -p"),
        ("run 04 --log README.md", "--log is that of a server at base_url"),
        ("serve --engine tpu", "expected one of auto, cpu, gpu"),
    ],
)
def test_what_no_command_takes_is_one_sentence_and_exit_code_2(shell, words, said):
    code, out, err = shell(*words.split())
    assert code == 2 and not out and said in err and err.count("\n") == 1


def test_a_log_may_be_that_of_the_server_in_the_environment(shell, monkeypatch):
    monkeypatch.setenv("QRECIPE_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.delenv("QRECIPE_LOG", raising=False)
    code, _, err = shell("run", "no_such_chapter", "--log", "README.md")
    assert code == 2 and "no notebook 'no_such_chapter'" in err


@pytest.mark.parametrize("bad", ["-1", "x", "1.5q", "nan", "1e99", ""])
@pytest.mark.parametrize("command, option", [(n, p) for n, p in OPTIONS if p.metavar == "NUMBER"], ids=str)
def test_a_number_out_of_range_is_refused_before_anything_is_done(shell, command, option, bad):
    code, out, err = shell(command, option.opts[0], bad, *(["runs"] if command == "report" else []))
    assert code == 2 and not out and err.startswith(f"qrecipe: {option.opts[0]} is ") and err.count("\n") == 1


def test_every_option_says_what_it_is_and_every_number_is_checked():
    assert [(n, p.name) for n, p in OPTIONS if not p.help and (n, p.name) != ("size", "help")] == []
    assert [
        (n, p.name)
        for n, p in OPTIONS
        if isinstance(p.default, (int, float)) and not p.is_flag and p.metavar != "NUMBER"
    ] == []
    assert [a.option_strings for a in parser()._actions if not a.help] == []


def test_no_command_shows_the_commands(shell):
    code, out, _ = shell()
    assert code == 2 and all(name in out for name in COMMANDS)


def test_a_card_with_the_memory_that_it_reports_here(shell):
    assert json.loads(
        shell("size", "Qwen3.5-4B", "--gpu", "RTX 4090", "--gpu-memory", "23.65", "--max-model-len", "8k", "--json")[1]
    )["fits"]


def test_without_a_card_the_advice_is_to_name_one(shell):
    advice = json.loads(shell("size", "Qwen3.5-4B", "--json")[1])["advice"]
    assert advice == ["name a card (--gpu) or its memory (--gpu-memory) to learn what fits"]
    assert "a card" not in shell("size", "Qwen3.5-4B", "--available-kv", "9")[1]


def test_counts_as_vllm_takes_them():
    assert [whole_number(x) for x in ("32768", "32k", "32K", "25.6k", "1m", "-5")] == [
        32768,
        32_000,
        32_768,
        25_600,
        10**6,
        -5,
    ]
    for bad in ("", "32,768", "25.6K", "1.5", "1e3", "k", "nan"):
        with pytest.raises(ValueError):
            whole_number(bad)


def test_the_parser_that_costs_most_is_not_loaded():
    code = "import sys; sys.argv = ['qrecipe', 'size', 'Qwen3.5-4B', '--gpu', 'A10', '--json']\nfrom qrecipe.cli import main\ntry:\n main()\nexcept SystemExit: pass\nassert not {'pydantic', 'rich', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_the_log_command(shell, tmp_path):
    code, out, _ = shell("log", recorded(), "--json")
    assert code == 0 and json.loads(out)["kv_cache_tokens"] == 3_464_967
    code, out, _ = shell("log", recorded("262144"))
    assert code == 1 and "--max-model-len 107712" in out
    whole = gzip.compress(recorded().read_bytes())
    for name, data, said in [
        ("a.log", b"", "empty"),
        ("b.log", b"\x7fELF\0\0", "binary"),
        ("c.gz", whole[:12], "damaged"),
        ("d.txt", b"Dear diary\n", "no line"),
    ]:
        (tmp_path / name).write_bytes(data)
        code, out, err = shell("log", tmp_path / name)
        assert code == 2 and said in err and err.count("\n") == 1
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    assert "8.61" in shell("log", tmp_path / "cut.gz")[1]


@pytest.mark.parametrize(
    "words, told",
    [
        (["Qwen3.5-4B", "--max-num-seq", "8"], r"did you mean --max-num-seqs\?"),
        (["Qwen3.5-4B", "--gpu-memory-utilisation=0.9"], r"did you mean --gpu-memory-utilization\?"),
        (["Qwen3.5-4B", "--gpu", "2x RTX 4090"], "several by --tensor-parallel-size"),
        (["."], "is a folder without a config.json"),
        (["Org/None"], r"could not be fetched \(HF_HUB_OFFLINE=1 allows no network\)"),
    ],
)
def test_a_slip_is_told_with_its_mend(tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match=told):
        predict(words)


def test_a_log_that_ends_early_says_so_and_a_pipe_is_read():
    head = b"INFO 12-01 10:00:00 [gpu_model_runner.py:5132] Model loading took 8.61 GiB memory and 3.455410 seconds\n"
    words = [sys.executable, "-c", "from qrecipe.cli import main; main()", "log", "-"]
    done = subprocess.run(words, input=head, capture_output=True, timeout=60)
    assert done.returncode == 0 and b"ends before the server was ready" in done.stdout
