"""`qrecipe size` and `qrecipe log` as a user types them: exit codes, keys, one sentence for what is wrong."""

import gzip
import json
import subprocess
import sys

import pytest

from qrecipe.cli import main
from qrecipe.log_source import recorded
from qrecipe.memory import JSON_KEYS, Flags
from qrecipe.size_command import parser, whole_number


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
        (["--tensor-parallel-size", "5"], "does not divide"),
        (["--tensor-parallel-size", "1.5"], "a whole number is expected"),
        (["--limit-mm-per-prompt", "{"], "JSON"),
        (["--available-kv", "nan"], "available_kv"),
        (["--calibrate", "/no/log"], "vLLM log"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(shell, words, said):
    code, out, err = shell("size", "Qwen3-8B", *words)
    assert code == 2 and not out and said in err and err.count("\n") == 1


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
