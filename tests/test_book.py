"""The book on the real engine: every chapter by papermill against one vLLM server, and nothing left afterwards."""

import json
import re
import signal
import socket
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, is_free, wait_until
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = pytest.mark.engine
CHAPTERS = sorted(p.stem for p in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
BY_MACHINE = {"3.2", "3.4", "5.4", "7.1", "8.2"}  # exercises whose answer is the machine's own, or wants another server
ANSWERS = {n: a for n, a in json.loads((ROOT / "tests/data/answers.json").read_text()).items() if n not in BY_MACHINE}


@pytest.fixture(scope="session")
def book(engine):
    """One `qrecipe run` of all chapters: (finished process, run folder)."""
    out = engine.folder / "book"
    answers = json.dumps({n: [a["wrong"][0][0], a["right"][0]] for n, a in ANSWERS.items()})
    words = ["-p", "port", engine.port, "-p", "answers", answers]
    done = engine.run(
        "qrecipe.cli",
        "run",
        "--engine",
        "cpu",
        "--out",
        out,
        "--publish",
        engine.folder / "published",
        *words,
        timeout=1800,
    )
    print(done.stdout, done.stderr)
    return done, out


def test_every_chapter_passes_and_nothing_is_left(engine, book):
    done, out = book
    run = json.loads((out / "run.json").read_text())
    assert [(c["name"], c["status"], c["reason"]) for c in run["chapters"]] == [(n, "passed", "") for n in CHAPTERS]
    assert done.returncode == 0
    assert str(out / "index.html") in done.stdout.splitlines()[-1]
    assert engine.processes() == [] and is_free(engine.port)


def test_every_exercise_is_answered_wrong_then_right(book):
    kept = {}
    for file in (book[1] / "exercises").glob("*.json"):
        kept |= json.loads(file.read_text())
    assert {n: (e["state"], len(e["tries"])) for n, e in kept.items()} == dict.fromkeys(ANSWERS, ("right", 2))


def test_the_published_copy_is_whole_and_names_no_machine(engine, book):
    copy = engine.folder / "published"
    assert {p.stem for p in copy.glob("*.ipynb")} == set(CHAPTERS) and (copy / "index.html").is_file()
    for file in copy.iterdir():
        text = file.read_text()
        for name in (str(ROOT), str(engine.folder), str(Path.home()) + "/", sys.prefix):
            assert name not in text, (file.name, name)
    assert all(nbformat.read(p, as_version=4).cells[1].id == "stamp" for p in copy.glob("*.ipynb"))


def test_one_server_served_them_all_and_its_log_is_kept(book):
    _, out = book
    run = json.loads((out / "run.json").read_text())
    assert [p.name for p in out.glob("server-*.log")] == [run["server"]["log"]]
    assert run["server"]["ready_seconds"] > 0
    assert (out / run["server"]["log"]).read_text().count("Initializing a V1 LLM engine") == 1


def test_run_json_says_what_it_ran_on(book):
    run = json.loads((book[1] / "run.json").read_text())
    assert run["engine"] == "cpu" and run["versions"]["vllm"] == "0.27.0+cpu"
    assert re.fullmatch("[0-9a-f]{64}", run["lock_sha256"])
    assert re.fullmatch("[0-9a-f]{64}", run["model"]["shards_sha256"]["model.safetensors"])
    assert all(c["measured"] for c in run["chapters"])


def test_the_report_holds_every_chapter_and_opens_without_a_network(book):
    page = (book[1] / "index.html").read_text()
    for name in CHAPTERS:
        assert f'id="{name}"' in page
    loads = re.findall(r'<(?:script|link|img|iframe)[^>]*?(?:src|href)=["\']?(?!data:)([^"\'> ]+)', page)
    assert loads == [] and "@import" not in page and "url(http" not in page
    assert "KV cache" in page and "<img" in page


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["SIGINT", "SIGTERM", "SIGKILL"]
)
def test_papermill_ended_while_the_server_starts_leaves_nothing(engine, number, tmp_path):
    papermill = engine.start(
        "papermill", "03_serve.ipynb", tmp_path / "out.ipynb", "-p", "port", engine.port, cwd=ROOT / "notebooks"
    )
    assert wait_until(lambda: len(engine.processes()) >= 2, 120), "the server did not get to its engine core"
    papermill.send_signal(number)
    papermill.wait(60)
    assert engine.clean()


def notebook(path, *cells):
    nb = new_notebook(cells=[new_code_cell(c) for c in cells])
    nb.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nb, path)
    return path


def test_a_shared_server_outlives_each_owner_but_the_last(engine, tmp_path):
    """On one ready server: a failing cell, then its first owner killed, then the last one killed in mid-request."""
    head = f'import qrecipe\nchapter = qrecipe.begin("x", engine="cpu", port={engine.port})\nserver = chapter.server()'
    forever = (
        "from openai import OpenAI\nclient = OpenAI(base_url=server.base_url, api_key=server.api_key)\n"
        f"open({str(tmp_path / 'asking')!r}, 'w').close()\n"
        "while True:\n    client.chat.completions.create(model=server.model, max_tokens=4096, temperature=1.0,\n"
        "        messages=[{'role': 'user', 'content': 'go on'}], extra_body={'ignore_eos': True})"
    )
    first = engine.start("qrecipe.cli", "serve", "--engine", "cpu", "--port", engine.port)
    status = ["qrecipe.cli", "status", "--port", engine.port, "--json"]

    def ready():
        assert first.poll() is None, "qrecipe serve ended"
        found = json.loads(engine.run(*status).stdout or "[]")
        return bool(found) and found[0]["status"] == "ready"

    assert wait_until(ready, 600)
    failing = notebook(tmp_path / "failing.ipynb", head, "1 / 0")
    assert engine.run("papermill", failing, tmp_path / "failed.ipynb").returncode != 0
    assert ready()
    asking = engine.start("papermill", notebook(tmp_path / "asking.ipynb", head, forever), tmp_path / "asked.ipynb")
    assert wait_until((tmp_path / "asking").exists, 60)
    first.kill()
    first.wait()
    time.sleep(2)
    assert json.loads(engine.run(*status).stdout)[0]["status"] == "ready"
    asking.kill()
    asking.wait()
    assert engine.clean()


def test_bad_words_on_the_command_line_are_one_sentence_and_exit_2(engine):
    for words, said in [
        (["run", "99"], "no notebook '99'"),
        (["run", "01", "-p", "prot", "1"], "unknown parameter prot"),
        (["run", "01", "--engine", "tpu"], "expected one of"),
        (["run", "01", "-p", "base_url", "http://127.0.0.1:9/v1"], "no server answers"),
        (["run", "03", "-p", "model", "/nowhere"], "/nowhere"),
        (["serve", "/nowhere"], "/nowhere"),
        (["run", "01", "--out", str(ROOT / "notebooks")], "not an empty folder"),
    ]:
        done = engine.run("qrecipe.cli", *words)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), (words, done.stderr)
        assert said in done.stderr
        assert engine.processes() == []


def test_a_taken_port_is_named_before_anything_starts(engine):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", engine.port))
        s.listen()
        done = engine.run("qrecipe.cli", "run", "03", "--engine", "cpu", "-p", "port", engine.port)
    assert done.returncode == 2 and f"port {engine.port}" in done.stderr
