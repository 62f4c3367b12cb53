"""One real server with a key, as a class has it: what it refuses, thirty seats at once, and an engine that dies under it."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import is_free, wait_until

from qrecipe.recipe import recipe_for
from qrecipe.workshop import FLAGS, reset, seat_keys

pytestmark = pytest.mark.engine
CAP = 1024
SEATS = 26
PAPERMILL = ("03_serve", "03_serve", "06_multimodal", "05_dissect_request")
PAPERMILL = PAPERMILL if os.environ.get("QRECIPE_FAULTS") == "all" else ("03_serve",) * 4  # all: minutes more


@pytest.fixture(scope="module")
def school(engine):
    """A kept server with a new key and a cap: (engine, its state, headers with the key, base address)."""
    words = ["serve", "--engine", "cpu", "--port", engine.port, "--keep", "--new-key"]
    for word in (*FLAGS, "--override-generation-config", json.dumps({"max_new_tokens": CAP})):
        words += ["--extra", word]
    own, engine.env = engine.env, engine.env | {"VLLM_MAX_N_SEQUENCES": "1"}
    done = engine.run("qrecipe.cli", *words, timeout=600)
    engine.env = own
    assert done.returncode == 0, done.stderr
    folder = engine.state / f"servers/port-{engine.port}"
    key = (folder / "api-key").read_text()
    assert key not in done.stdout + done.stderr and "open without it: /health" in done.stdout
    yield engine, folder, {"Authorization": f"Bearer {key}"}, f"http://127.0.0.1:{engine.port}"
    engine.run("qrecipe.cli", "stop", "--port", engine.port)
    assert engine.clean()


def chat(base, headers, content, **more):
    body = {"model": "qwen3.5-4b", "max_tokens": 1, "messages": [{"role": "user", "content": content}]} | more
    return httpx.post(base + "/v1/chat/completions", json=body, headers=headers, timeout=600)


def test_the_key_is_asked_for_and_is_nowhere_but_in_its_file(school):
    engine, folder, headers, base = school
    key = headers["Authorization"].split()[1]
    assert chat(base, {}, "hello").status_code == chat(base, {"Authorization": "Bearer x"}, "hello").status_code == 401
    assert chat(base, headers, "hello").status_code == 200
    for path in ("/health", "/metrics", "/version"):
        assert httpx.get(base + path).status_code == 200
    assert oct((folder / "api-key").stat().st_mode & 0o777) == "0o600"
    assert oct(engine.state.stat().st_mode & 0o777) == "0o700"
    files = [p for p in engine.state.rglob("*") if p.is_file() and p.suffix in (".json", ".log")]
    assert len(files) >= 3
    for file in files:
        assert key not in file.read_text(errors="replace"), file
    processes = engine.processes()
    assert len(processes) >= 2 and not any(key in " ".join(p.cmdline()) for p in processes)


def bearer(key: str) -> dict:
    return {"Authorization": f"Bearer {key}"}


def test_a_seat_has_a_key_of_its_own_and_after_a_reset_another_one(school, monkeypatch, tmp_path):
    engine, _, headers, base = school
    monkeypatch.setenv("QRECIPE_STATE", str(engine.state))
    keys = seat_keys(3)
    file = tmp_path / "runs/exercises/03_serve.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert [chat(base, bearer(key), "hello").status_code for key in keys.values()] == [200] * 3
    assert reset(2, tmp_path / "runs") == ["03_serve"] and not file.exists()
    assert [chat(base, bearer(key), "hello").status_code for key in keys.values()] == [200, 401, 200]
    assert chat(base, bearer(seat_keys(3)[2]), "hello").status_code == 200
    said = "".join(p.read_text(errors="replace") for p in engine.state.rglob("*.log"))
    said += " ".join(" ".join(p.cmdline()) for p in engine.processes())
    assert not any(key in said for key in keys.values())


def test_the_teacher_s_notebook_tries_every_seat_and_sets_one_back(school, tmp_path):
    engine, _, headers, base = school
    words = ["qrecipe.cli", "run", "workshop", "--out", tmp_path / "out", "-p", "base_url", base + "/v1"]
    words += ["-p", "seats", 6, "-p", "cap", CAP, "-p", "reset_seat", 4]
    own, engine.env = engine.env, engine.env | {"VLLM_API_KEY": headers["Authorization"].split()[1]}
    done = engine.run(*words, timeout=600)
    engine.env = own
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "out/run.json").read_text())["chapters"][0]["measured"]
    assert measured["seats with a key of their own"]["value"] == measured["seats answered"]["value"] == 6
    cells = json.loads((tmp_path / "out/workshop.ipynb").read_text())["cells"]
    said = "".join(sum((o.get("text", []) for c in cells for o in c.get("outputs", [])), []))
    assert "the cap holds" in said and "one answer a request" in said, said


def test_a_picture_on_this_very_machine_is_not_fetched(school):
    _, _, headers, base = school
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

    own = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=own.serve_forever, daemon=True).start()
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433"):
        url = f"http://{host}:{own.server_port}/x.png"
        reply = chat(base, headers, [{"type": "image_url", "image_url": {"url": url}}])
        assert reply.status_code == 400 and "allowed domains" in reply.text, (host, reply.text)
    reply = chat(base, headers, [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}])
    assert (
        reply.status_code in (400, 500) and "choices" not in reply.json()
    )  # vLLM 0.27.0 answers a local file with 500
    own.shutdown()
    assert asked == []


FETCH = """
import sys
from vllm.multimodal.media.connector import MediaConnector
try:
    MediaConnector(allowed_media_domains=["127.0.0.1"]).fetch_image(sys.argv[1])
except Exception as e:
    print(type(e).__name__)
"""


@pytest.mark.parametrize("allow, asked", [("0", ["/here.png"]), ("1", ["/here.png", "/inside"])])
def test_a_redirect_from_the_one_allowed_domain_is_not_followed(allow, asked):
    """By what the book's server has in its environment; with a 1 there vLLM 0.27.0 follows it to wherever it leads."""
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            got.append(self.path)
            self.send_response(302 if self.path == "/here.png" else 404)
            self.send_header("Location", f"http://localhost:{own.server_port}/inside")
            self.end_headers()

        def log_message(self, *_):
            pass

    name = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
    env = recipe_for("cpu", "OWNER/NAME").env
    assert env[name] == "0"
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as own:
        threading.Thread(target=own.serve_forever, daemon=True).start()
        words = [sys.executable, "-c", FETCH, f"http://127.0.0.1:{own.server_port}/here.png"]
        done = subprocess.run(words, env=os.environ | env | {name: allow}, capture_output=True, text=True)
        own.shutdown()
    assert done.stdout.strip().endswith("Error") and got == asked, done.stderr


def test_no_answer_grows_beyond_the_cap(school):
    _, _, headers, base = school
    reply = chat(base, headers, "hello", max_tokens=CAP + 50, ignore_eos=True)
    assert reply.json()["usage"]["completion_tokens"] == CAP


def test_thirty_seats_at_once(school, tmp_path, monkeypatch):
    """Four seats run whole chapters; 26 send chapter 5's streamed requests. Each has a key and a length of its own, which its usage must name."""
    from openai import OpenAI

    from qrecipe.request import dissect

    engine, _, headers, base = school
    monkeypatch.setenv("QRECIPE_STATE", str(engine.state))
    keys = seat_keys(SEATS + len(PAPERMILL))
    state, runs = engine.env, []
    for i, name in enumerate(PAPERMILL):
        engine.env = state | {"VLLM_API_KEY": keys[SEATS + 1 + i], "QRECIPE_STATE": str(tmp_path / "seat")}
        words = ["qrecipe.cli", "run", name, "--out", tmp_path / f"seat{i}", "-p", "base_url", base + "/v1"]
        runs.append(engine.start(*words))
    engine.env = state

    def seat(n: int) -> list[int]:
        lengths, client = [], OpenAI(base_url=base + "/v1", api_key=keys[n + 1], timeout=600)
        while not lengths or (n < 4 and any(r.poll() is None for r in runs)):  # four go on while the chapters run
            messages = [{"role": "user", "content": f"Seat {n}: why does KV cache memory grow with context length?"}]
            found = dissect(
                client, model="qwen3.5-4b", messages=messages, max_tokens=16 + n, extra_body={"ignore_eos": True}
            )
            lengths.append(found.completion_tokens)
            time.sleep(1)
        return lengths

    with ThreadPoolExecutor(SEATS) as pool:
        got = list(pool.map(seat, range(SEATS)))
    assert [set(lengths) for lengths in got] == [{16 + n} for n in range(SEATS)]
    for i, run in enumerate(runs):
        run.wait(600)
        verdict = json.loads((tmp_path / f"seat{i}/run.json").read_text())
        assert verdict["passed"] and verdict["engine"] == "attached", verdict["chapters"]
        page = (tmp_path / f"seat{i}/index.html").read_text() + (tmp_path / f"seat{i}/run.json").read_text()
        assert keys[SEATS + 1 + i] not in page
    assert not (tmp_path / "seat/servers").exists()  # no seat started or stopped anything


def test_an_engine_core_killed_under_its_server_ends_it_and_is_named(school):
    engine, folder, _, _ = school
    core = next(p for p in engine.processes() if p.name().startswith("VLLM::EngineCor"))
    core.kill()
    assert wait_until(lambda: json.loads((folder / "server.json").read_text())["status"] == "died", 30)
    assert engine.clean() and is_free(engine.port)
    assert Path(json.loads((folder / "server.json").read_text())["log"]).is_file()
