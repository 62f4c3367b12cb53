"""Chapters 07 and 08: room for an LLM, processes that leave nothing behind, benchmark results read."""

import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from conftest import ROOT, wait_until
from nbformat.v4 import new_code_cell
from replay import replay

from qrecipe import batch, bench, layers
from qrecipe.batch import Offline, extra_arguments, no_room, place
from qrecipe.bench import Bench, comparable, read_bench, recorded, run_bench
from qrecipe.book import Execution
from qrecipe.chapter import Chapter
from qrecipe.child import Child
from qrecipe.errors import BadInput, RequestFailed, ServerFailed
from qrecipe.processes import server_processes

H200 = "h200-vllm0.27.0-qwen3.5-4b-util0.20-seqs256"


def test_an_llm_has_room_on_an_idle_gpu_and_none_beside_a_server():
    assert no_room((139.8, 139.2)) is None
    assert no_room(None) is None  # no GPU, no such limit
    why = no_room((139.8, 13.4))
    assert "0.92" in why and "139.8 GiB" in why and "128.6 GiB" in why and "13.4 GiB are free" in why


@pytest.mark.parametrize("engine, parameters, memory, why", [
    ("gpu", {}, (24.0, 23.9), None),
    ("gpu", {}, (24.0, 2.0), "2.0 GiB are free"),
    ("cpu", {}, None, None),
    ("attached", {"model": str(ROOT)}, (24.0, 2.0), "2.0 GiB are free"),
    ("attached", {"model": str(ROOT)}, (24.0, 23.9), None),
    ("attached", {"model": "far/away"}, (24.0, 23.9), "base_url names a server"),
    ("attached", {}, None, "base_url names a server"),
])  # fmt: skip
def test_where_an_llm_can_run(monkeypatch, engine, parameters, memory, why):
    monkeypatch.setattr(batch, "gpu_memory", lambda **_: memory)
    monkeypatch.setattr(layers, "choose_engine", lambda facts, asked: ("gpu" if memory else "cpu", "stub"))
    chapter = Chapter("07_offline_inference", engine, "", parameters, "", {})
    chapter.model_dir = str(ROOT)  # also that of a server at base_url on this very machine
    found = place(chapter)
    assert (why is None and found.why_not is None) or why in found.why_not
    assert found.engine == ("gpu" if memory else "cpu")


@pytest.mark.parametrize("attached", ["", "parameter", "environment"])
def test_beside_a_server_on_the_gpu_chapter_07_is_skipped_and_says_why(tmp_path, attached):
    nb = nbformat.read(ROOT / "notebooks" / "07_offline_inference.ipynb", 4)
    stub = (
        "import qrecipe.batch, qrecipe.layers\n"
        "qrecipe.batch.gpu_memory = lambda **_: (24.0, 1.5)\n"
        "qrecipe.layers.choose_engine = lambda *_: ('gpu', 'stub')"
    )
    nb.cells.insert(1, new_code_cell(stub))
    nbformat.write(nb, tmp_path / "07_offline_inference.ipynb")
    out = tmp_path / "out"
    out.mkdir()
    with replay(models=("qwen3.5-4b",)) as (url, asked):
        parameters = {"base_url": url} if attached == "parameter" else {}
        env = {"QRECIPE_BASE_URL": url if attached == "environment" else ""}
        verdict = Execution(tmp_path / "07_offline_inference.ipynb", parameters, out, 60, env).begin(120).verdict()
    assert (verdict.status, verdict.measured) == ("skipped", {})
    why = "base_url names a server, so nothing is started here" if attached else "1.5 GiB are free"
    assert why in verdict.reason and ("without base_url" if attached else "qrecipe stop") in verdict.reason
    assert not list(out.glob("*.py")) and asked == []


def test_serve_words_become_arguments():
    words = [
        "--gdn-prefill-backend",
        "triton",
        "--enforce-eager",
        "--max-num-seqs=8",
        "--limit-mm-per-prompt",
        '{"image": 0}',
    ]
    assert extra_arguments(words) == {
        "gdn_prefill_backend": "triton", "enforce_eager": True, "max_num_seqs": 8, "limit_mm_per_prompt": {"image": 0},
    }  # fmt: skip


def test_what_only_a_server_has_is_no_argument_of_llm():
    ask = (
        "from dataclasses import fields; from vllm.engine.arg_utils import EngineArgs as E; "
        "from vllm.entrypoints.openai.cli_args import FrontendArgs as F; "
        "e, f = ({a.name for a in fields(c)} for c in (E, F)); print('\\n', *e, '\\n', *(f - e))"
    )
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    engine, server = (line.split() for line in told.splitlines()[-2:])
    assert "middleware" in server and len(engine) > 100

    def kept(names):
        return set(extra_arguments([f"--{n.replace('_', '-')}=1" for n in names]))

    assert kept(server) == set() and kept(engine) == set(engine)


def script(folder: Path, work: str) -> Path:
    """A script that speaks as chapter 07's does, without an LLM."""
    path = folder / "script.py"
    path.write_text(
        "import json, os, subprocess, sys, time\nprint(sys.stdin.readline(), end='', flush=True)\n"
        "for line in sys.stdin:\n    job = json.loads(line)\n" + textwrap.indent(textwrap.dedent(work), "    ")
    )
    return path


def test_a_script_answers_line_by_line_and_is_gone_when_closed(tmp_path):
    llm = Offline(
        script(tmp_path, "print(json.dumps({'twice': 2 * job['n']}), flush=True)"), {"model": "m"}, log=tmp_path / "log"
    )
    assert [llm.ask(n=n) for n in (1, 2)] == [{"twice": 2}, {"twice": 4}]
    assert len(llm.child.processes()) == 1 and llm.child.memory_gib() > 0
    assert llm.close() == [] and llm.child.processes() == [] and llm.close() == []


@pytest.mark.parametrize("work, error, words", [
    ("print(json.dumps({'error': 'too long'}), flush=True)", RequestFailed, "too long"),
    ("print('hello', flush=True)", ServerFailed, "'hello' where a line of JSON was expected"),
    ("sys.exit('no memory for this')", ServerFailed, r"exit code 1\): no memory for this"),
    ("os.kill(os.getpid(), 9)", ServerFailed, "exit code -9"),
    ("subprocess.Popen(['sleep', '60']); os._exit(3)", ServerFailed, "exit code 3"),
    ("time.sleep(60)", ServerFailed, "no answer within 2 s"),
])  # fmt: skip
def test_what_goes_wrong_in_the_script_is_one_sentence_and_leaves_nothing(tmp_path, work, error, words):
    llm = Offline(script(tmp_path, work), {}, log=tmp_path / "log")
    with pytest.raises(error, match=words):
        llm.ask(timeout=2)
    llm.close()
    assert llm.child.processes() == []


def test_a_failed_start_says_the_log_s_last_line(tmp_path):
    (tmp_path / "bad.py").write_text("import no_such_module")
    with pytest.raises(ServerFailed, match="no_such_module"):
        Offline(tmp_path / "bad.py", {}, log=tmp_path / "log")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_parent_leaves_no_child_and_no_grandchild(tmp_path, number):
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom qrecipe.child import Child\n"
        "own = 'import setproctitle, time; setproctitle.setproctitle(\"VLLM::EngineCore\"); time.sleep(600)'\n"
        "code = f'import subprocess, sys, time; subprocess.Popen([sys.executable, \"-c\", {own!r}], start_new_session=True); time.sleep(600)'\n"
        f"child = Child([sys.executable, '-c', code], Path({str(tmp_path / 'log')!r}))\n"
        "print(child.token, flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, parent], stdout=subprocess.PIPE, text=True)
    token = process.stdout.readline().strip()
    assert wait_until(lambda: any("EngineCore" in " ".join(p.cmdline()) for p in server_processes(token)), 20)
    os.kill(process.pid, number)
    process.wait(10)
    assert wait_until(lambda: not server_processes(token), 10)


def test_the_recorded_h200_runs_obey_little_s_law():
    found = recorded(H200)
    assert [b.concurrency for b in found] == [1, 8, 32]
    assert all(b.little == pytest.approx(b.concurrency, rel=0.02) for b in found)
    assert found[-1].ms("ttft", 50) == 333.32 and found[-1].ms("ttft", 99) == 422.78
    assert found[-1].ms("ttft", 90) is None and found[-1].mean("running") is None


def test_two_workloads_compare_only_when_they_are_the_same():
    one, two = recorded(H200)[:2]
    assert comparable(one, one) == []
    assert comparable(one, two) == ["max_concurrency 8 against 1"]


GOOD = {"max_concurrency": 4, "completed": 8, "request_throughput": 2.0, "output_throughput": 64.0, "duration": 4.0}


@pytest.mark.parametrize("content, words", [
    (None, "cannot be read"),
    ("", "is not JSON"),
    ('{"max_concurrency": 4', "is not JSON"),
    ("[1]", "no result of vllm bench serve"),
    ("{}", "completed, duration, max_concurrency, output_throughput, request_throughput missing"),
    (json.dumps(GOOD | {"completed": 0, "errors": ["", "Traceback\nConnectionError: refused"]}), "ConnectionError: refused"),
])  # fmt: skip
def test_a_file_that_is_no_result_is_refused_with_the_reason(tmp_path, content, words):
    if content is not None:
        (tmp_path / "r.json").write_text(content)
    with pytest.raises(BadInput, match=words):
        read_bench(tmp_path / "r.json")


class Metrics(http.server.BaseHTTPRequestHandler):
    finished = 5

    def do_GET(self):
        lines = [f'vllm:{n}{{engine="0"}} {v}' for n, v in [
            ("num_requests_running", 4), ("num_requests_waiting", 3), ("kv_cache_usage_perc", 0.25), ("request_success_total", Metrics.finished)]]  # fmt: skip
        lines.append('vllm:cache_config_info{block_size="384",num_gpu_blocks="2730"} 1.0')
        Metrics.finished += 8
        self.send_response(200)
        self.end_headers()
        self.wfile.write(("\n".join(lines) + "\n").encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metrics():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def bench_stub(monkeypatch, folder: Path, code: str) -> list[str]:
    """`vllm` replaced by a program that prints what `vllm bench serve` prints."""
    (folder / "stub.py").write_text("import json, sys, time\n" + textwrap.dedent(code))
    monkeypatch.setattr(bench, "VLLM", (sys.executable, str(folder / "stub.py")))
    return ["vllm", "bench", "serve"]


def test_a_benchmark_is_watched_while_it_runs(monkeypatch, tmp_path, metrics):
    code = f"""
        print("Warming up"); print("Starting main benchmark run..."); time.sleep(1.2)
        json.dump({GOOD | {"mean_e2el_ms": 1900.0}}, open({str(tmp_path / "r.json")!r}, "w"))
        print("============ Serving Benchmark Result ============")
    """
    found = run_bench(bench_stub(monkeypatch, tmp_path, code), tmp_path / "r.json", metrics, every=0.1)
    assert found.concurrency == 4 and found.little == pytest.approx(3.8)
    assert len(found.busy) >= 5 and (found.mean("running"), found.mean("waiting"), found.busy[0].kv_usage) == (
        4,
        3,
        0.25,
    )
    assert found.server.requests >= 8
    assert "Serving Benchmark Result" in (tmp_path / "r.log").read_text()
    assert bench.cache_config(metrics) == {"block_size": "384", "num_gpu_blocks": "2730"}


def test_a_benchmark_against_a_server_without_metrics_has_the_client_s_figures_alone(monkeypatch, tmp_path):
    code = f'print("Starting main benchmark run..."); json.dump({GOOD}, open({str(tmp_path / "r.json")!r}, "w"))'
    found = run_bench(bench_stub(monkeypatch, tmp_path, code), tmp_path / "r.json", "http://127.0.0.1:9/v1")
    assert found.samples == () and found.server is None and found.little is None
    assert bench.cache_config("http://127.0.0.1:9/v1") == {}


@pytest.mark.parametrize("code, error, words", [
    ("sys.exit('ValueError: Initial test run failed')", ServerFailed, "Initial test run failed"),
    ("pass", BadInput, "cannot be read"),
    ("time.sleep(60)", ServerFailed, "did not end within 1 s"),
])  # fmt: skip
def test_a_benchmark_that_fails_says_why_and_leaves_nothing(monkeypatch, tmp_path, code, error, words):
    seen = []
    real = Child.__init__
    monkeypatch.setattr(Child, "__init__", lambda self, *a, **k: (real(self, *a, **k), seen.append(self))[0])
    with pytest.raises(error, match=words):
        run_bench(
            bench_stub(monkeypatch, tmp_path, code),
            tmp_path / "r.json",
            "http://127.0.0.1:9/v1",
            timeout=1 if "60" in code else 30,
        )
    assert seen[0].processes() == []


def test_an_interrupted_question_ends_the_process(tmp_path):
    llm = Offline(script(tmp_path, "time.sleep(60)"), {}, log=tmp_path / "log")
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.ask()
    assert time.monotonic() - began < 20 and llm.child.processes() == []


def test_the_guard_ends_with_its_child(tmp_path):
    child = Child(["sleep", "60"], tmp_path / "log")
    guard = psutil.Process(child._guard.pid)
    child.end()
    assert not guard.is_running() or guard.status() == psutil.STATUS_ZOMBIE


def test_a_bench_without_samples_has_no_means():
    assert Bench(GOOD).mean("waiting") is None and Bench(GOOD).busy == []
