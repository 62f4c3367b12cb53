"""The server's life on a stub with vLLM's process tree; the real engine is in test_book.py."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import free_port

from qrecipe import serving
from qrecipe.cli import main, stop
from qrecipe.errors import BadInput, ServerFailed
from qrecipe.processes import Pid, server_processes
from qrecipe.recipe import ServeRecipe
from qrecipe.serving import Server
from qrecipe.start_checks import check_gpus, check_head, check_start

STUB = Path(__file__).with_name("stub")


@pytest.fixture
def port():
    return free_port()


class Manner(dict):
    """Words for the stub, handed on by the environment."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        os.environ["STUB"] = " ".join(f"{k}={v}" for k, v in self.items())


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """`vllm serve` is the stub, in a state folder of the test's own; nothing may be left of it."""
    for name, value in {"QRECIPE_STATE": tmp_path / "state", "PYTHONPATH": STUB, "STUB": "load=0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    yield Manner()
    for folder in (tmp_path / "state" / "servers").glob("port-*"):
        state = serving.read_state(folder)
        serving.stop(int(folder.name[5:]))
        assert not state or server_processes(state["token"]) == []


def gone(token: str, seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not server_processes(token):
            return True
        time.sleep(0.1)
    return False


def token_of(server: Server) -> str:
    return serving.read_state(server.folder)["token"]


def outsider(port: int, action: str = "time.sleep(600)") -> subprocess.Popen:
    """Another process that joins the server on this port and then does `action`."""
    code = (
        "import time; from qrecipe import serving\n"
        f"serving.join(serving.server_folder({port})); print('joined', flush=True); {action}"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "joined\n"
    return process


def test_start_answers_and_leaving_ends_the_whole_tree(stub, port):
    server = Server.start(ServeRecipe("stub", port=port))
    assert (server.model, server.max_model_len) == ("qwen3.5-4b", 4096)
    assert len(server_processes(token_of(server))) == 3
    server.leave(wait=20)
    assert server_processes(token_of(server)) == []
    assert serving.status(port)[0]["status"] == "stopped"


def test_a_second_start_joins_and_the_first_owner_may_go(stub, port):
    server = Server.start(ServeRecipe("stub", port=port))
    other = outsider(port)
    assert Server.start(ServeRecipe("stub", port=port)).log == server.log
    assert serving.status(port)[0]["owners"] == 2
    server.leave()
    time.sleep(1)
    assert len(server_processes(token_of(server))) == 3
    other.kill()
    other.wait()
    assert gone(token_of(server))


def test_other_flags_are_named_and_refused(stub, port):
    Server.start(ServeRecipe("stub", port=port))
    with pytest.raises(BadInput, match="max_model_len: it has 32768, you ask for 4096"):
        Server.start(ServeRecipe("stub", port=port, max_model_len=4096))


def test_a_killed_supervisor_takes_the_server_with_it(stub, port):
    server = Server.start(ServeRecipe("stub", port=port))
    os.kill(serving.read_state(server.folder)["supervisor"][0], signal.SIGKILL)
    assert gone(token_of(server))
    time.sleep(0.5)
    assert "supervisor was killed" in serving.read_state(server.folder)["why"]
    assert Server.start(ServeRecipe("stub", port=port)).model == "qwen3.5-4b"


def test_a_killed_engine_core_or_api_server_ends_the_rest(stub, port):
    server = Server.start(ServeRecipe("stub", port=port))
    os.kill(serving.read_state(server.folder)["pid"], signal.SIGKILL)
    assert gone(token_of(server))
    time.sleep(0.5)
    assert serving.read_state(server.folder)["status"] == "died"


def test_a_deaf_server_is_ended_all_the_same(stub, port):
    stub["deaf"] = ""
    server = Server.start(ServeRecipe("stub", port=port))
    server.stop()
    assert server_processes(token_of(server)) == []


def test_a_start_that_dies_says_why_and_where_the_log_is(stub, port):
    stub["dies"] = ""
    with pytest.raises(ServerFailed, match=r"server-.*\.log"):
        Server.start(ServeRecipe("stub", port=port))
    assert gone(serving.read_state(serving.server_folder(port))["token"])


def test_keep_outlives_its_owner_until_stop(stub, port, capsys):
    server = Server.start(ServeRecipe("stub", port=port), keep=True)
    server.leave()
    time.sleep(1)
    assert serving.status(port)[0]["status"] == "ready"
    stop(port=1024, every=False)  # no server of ours there: the one elsewhere is named
    assert f"no server runs on port 1024; on {port} one does: --port or --all" in capsys.readouterr().out
    server.stop()
    assert server_processes(token_of(server)) == []


def test_grace_keeps_the_server_for_a_restarted_kernel(stub, port):
    server = Server.start(ServeRecipe("stub", port=port), grace=3.0)
    server.leave()
    time.sleep(1)
    assert Server.start(ServeRecipe("stub", port=port), grace=0.0).log == server.log


def test_a_taken_port_names_its_holder_and_the_mend(stub, port):
    with socket.socket() as s:
        s.bind(("127.0.0.1", port))
        s.listen()
        with pytest.raises(BadInput, match=f"port {port}.*process {os.getpid()}.*another port"):
            Server.start(ServeRecipe("stub", port=port))


def test_a_model_folder_that_is_missing_is_known_before_the_start(stub, port, tmp_path):
    with pytest.raises(BadInput, match="nowhere"):
        Server.start(ServeRecipe(str(tmp_path / "nowhere"), port=port))
    assert serving.status(port) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"status": "ready"}'])
def test_a_damaged_state_file_is_put_aside(stub, port, content):
    folder = serving.server_folder(port)
    (folder / "server.json").write_text(content)
    assert Server.start(ServeRecipe("stub", port=port)).model == "qwen3.5-4b"
    assert (folder / "server.damaged").read_text() == content


def test_a_stale_state_file_does_not_stand_in_the_way(stub, port):
    server = Server.start(ServeRecipe("stub", port=port))
    server.stop()
    state = serving.read_state(server.folder) | {"status": "ready", "supervisor": [os.getpid(), 1]}
    (server.folder / "server.json").write_text(json.dumps(state))
    assert serving.status(port)[0]["status"] == "died"
    assert Server.start(ServeRecipe("stub", port=port)).log != server.log


def test_two_starts_at_once_become_one(stub, port, tmp_path):
    stub["load"] = "1"
    code = (
        "import sys; from qrecipe import serving; from qrecipe.recipe import ServeRecipe\n"
        f"print(serving.Server.start(ServeRecipe('stub', port={port})).log)"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    logs = {p.communicate(timeout=60)[0] for p in both}
    assert len(logs) == 1 and all(p.returncode == 0 for p in both)


@pytest.mark.parametrize(
    "base_url, words",
    [
        ("ftp://x", "is no address"),
        ("http://127.0.0.1:9/v1", "no server answers"),
        ("nonsense", "is no address"),
        ("http://[::1", "no server answers"),
        ("http://127.0.0.1:9/\n", "no server answers"),
    ],
)
def test_attach_refuses_what_is_no_server(base_url, words):
    with pytest.raises(BadInput, match=words):
        Server.attach(base_url)


class Foreign(http.server.BaseHTTPRequestHandler):
    """Answers with `says` whatever it is asked, and keeps the keys that it was sent."""

    says, keys = "", []

    def do_GET(self):
        self.keys.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.says.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def foreign():
    with http.server.HTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.parametrize(
    "says", ["[" * 100_000, '{"data": [{"id": 5}]}', '{"data": [{"id": ["a"]}]}', '{"data": [5]}', "5"]
)
def test_attach_refuses_a_list_of_models_that_is_none(foreign, monkeypatch, says):
    monkeypatch.setattr(Foreign, "says", says)
    with pytest.raises(BadInput, match="not as an OpenAI-compatible|does not serve ''"):
        Server.attach(foreign)


def test_attach_takes_no_odd_facts_and_sends_no_other_service_s_key(foreign, monkeypatch):
    monkeypatch.setattr(Foreign, "says", '{"data": [{"id": "a", "root": 7, "max_model_len": "x"}]}')
    monkeypatch.setenv("OPENAI_API_KEY", "a key of another service")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = Server.attach(foreign)
    assert (server.model, server.root, server.max_model_len) == ("a", "7", None)
    assert Foreign.keys[-1] == "Bearer EMPTY"


def test_attach_tells_a_missing_v1_and_an_unknown_model(stub, port):
    Server.start(ServeRecipe("stub", port=port))
    with pytest.raises(BadInput, match="is /v1 missing"):
        Server.attach(f"http://127.0.0.1:{port}/nothing")
    with pytest.raises(BadInput, match=r"does not serve 'other': it serves \['qwen3.5-4b'\]"):
        Server.attach(f"http://127.0.0.1:{port}/v1", model="other")


def test_a_foreign_server_s_log_can_be_handed_in(stub, port, monkeypatch, tmp_path):
    Server.start(ServeRecipe("stub", port=port))
    monkeypatch.setenv("QRECIPE_LOG", str(tmp_path / "its.log"))
    assert Server.attach(f"http://127.0.0.1:{port}/v1").log == tmp_path / "its.log"


def test_a_foreign_server_is_not_ours_to_stop(stub, port):
    Server.start(ServeRecipe("stub", port=port))
    with pytest.raises(BadInput, match="was not started by this book"):
        Server.attach(f"http://127.0.0.1:{port}/v1").stop()


def test_a_process_id_used_again_is_not_mistaken():
    me = Pid.of(os.getpid())
    assert me.alive() and not Pid(me.pid, me.ticks + 1).alive()


def test_a_run_s_own_failed_start_is_not_tried_again_by_its_chapters(stub, port, monkeypatch):
    stub["dies"] = ""
    with pytest.raises(ServerFailed):
        Server.start(ServeRecipe("stub", port=port))
    state = serving.read_state(serving.server_folder(port))
    monkeypatch.setenv(serving.SHARED, state["token"])
    with pytest.raises(ServerFailed, match="Log: "):
        Server.start(ServeRecipe("stub", port=port))
    assert serving.read_state(serving.server_folder(port)) == state


def test_another_host_is_refused_without_a_key_and_a_new_key_stays_in_its_file(stub, port, monkeypatch):
    open_ = ServeRecipe("stub", port=port, host="0.0.0.0")
    with pytest.raises(BadInput, match="host 0.0.0.0 lets other machines in and there is no API key"):
        Server.start(open_)
    server = Server.start(open_, new_key=True)
    file = server.folder / "api-key"
    assert len(server.api_key) >= 40 and file.read_text() == server.api_key and file.stat().st_mode & 0o777 == 0o600
    assert server.api_key not in repr(server) + (server.folder / "server.json").read_text() + server.log.read_text()
    assert serving.status(port)[0]["key_file"] == str(file)
    with pytest.raises(BadInput, match="wants an API key"):
        Server.attach(server.base_url)
    with pytest.raises(BadInput, match="wants another API key"):
        Server.attach(server.base_url, "wrong")
    server.stop()
    assert Server.start(open_, new_key=True).api_key == server.api_key  # the students' line stays good


def test_a_server_with_a_key_is_joined_from_here_and_not_with_another_key(stub, port, monkeypatch):
    server = Server.start(ServeRecipe("stub", port=port), new_key=True)
    assert Server.start(ServeRecipe("stub", port=port)).api_key == server.api_key
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    with pytest.raises(BadInput, match="API key: it has another, you give one"):
        Server.start(ServeRecipe("stub", port=port))


def test_a_server_without_a_key_is_not_joined_with_one_and_no_key_is_no_key(stub, port, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "EMPTY")
    server = Server.start(ServeRecipe("stub", port=port))
    assert server.api_key == "EMPTY" and not (server.folder / "api-key").exists()
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    with pytest.raises(BadInput, match="API key: it has none, you give one"):
        Server.start(ServeRecipe("stub", port=port))


@pytest.mark.parametrize(
    "words",
    [("--api-key", "x"), ("--host=0.0.0.0",), ("--port", "1"), ("--hos", "::"), ("--config", "x.yaml"),
     ("--trust-remote-code",), ("--allowed-media-domains", "*")],
)  # fmt: skip
def test_words_that_would_go_round_the_checks_are_refused(stub, port, words):
    with pytest.raises(BadInput, match=f"{words[0].split('=')[0]} among the extra words"):
        Server.start(ServeRecipe("stub", port=port, extra=words))
    if "-" in words[0][2:]:  # vLLM takes the one for the other
        with pytest.raises(BadInput, match="among the extra words"):
            Server.start(
                ServeRecipe("stub", port=port, extra=(words[0][:2] + words[0][2:].replace("-", "_"), *words[1:]))
            )


def test_a_server_that_cannot_be_ended_does_not_save_the_others(monkeypatch, capsys):
    def stop(port):
        if port == 8001:
            raise ServerFailed("processes [7] of the server on port 8001 could not be ended")
        return {"status": "stopped"}

    monkeypatch.setattr(serving, "status", lambda port=None: [{"port": p, "status": "ready"} for p in (8001, 8002)])
    monkeypatch.setattr(serving, "stop", stop)
    monkeypatch.setattr("sys.argv", ["qrecipe", "stop", "--all"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert (
        end.value.code == 1
        and "port 8001 could not be ended" in said.err
        and "stopped the server on port 8002" in said.out
    )


@pytest.mark.parametrize("host, address", [("::1", "[::1]"), ("127.0.0.53", "127.0.0.53"), ("localhost", "127.0.0.1")])
def test_any_loopback_address_needs_no_key_and_is_reached(stub, port, host, address):
    server = Server.start(ServeRecipe("stub", port=port, host=host))
    assert server.base_url == serving.status(port)[0]["base_url"] == f"http://{address}:{port}/v1" and server.model


def test_one_endless_line_does_not_hide_the_log_s_last_words(tmp_path):
    (tmp_path / "x.log").write_text("first\n" + "A" * 300_000 + "\nValueError: why\n")
    said = serving.tail(tmp_path / "x.log")
    assert said.splitlines()[-1] == "ValueError: why" and len(said) < 1100 and "first" not in said
    assert serving.tail(tmp_path / "none.log") == ""


def test_a_model_is_no_option():
    with pytest.raises(BadInput, match="no model given"):
        ServeRecipe("--trust-remote-code")


def test_one_who_joins_with_keep_keeps_it(stub, port):
    server = Server.start(ServeRecipe("stub", port=port))
    Server.start(ServeRecipe("stub", port=port), keep=True).leave()
    time.sleep(1)
    assert serving.status(port)[0] | {"owners": 0} == serving.status(port)[0] and serving.status(port)[0]["keep"]
    server.stop()


def test_a_gpu_in_use_is_named_before_anything_starts(stub, port, monkeypatch):
    def smi(*words):
        return (
            "4242, python, 60000 MiB\n"
            if any("compute-apps" in w for w in words)
            else "0, 20480, 81920\n1, 81000, 81920\n"
        )

    monkeypatch.setattr("qrecipe.facts._output", smi)
    with pytest.raises(BadInput, match=r"GPU 0 has 20.0 of 80.0 GiB free, 0.90.*4242, python.*utilization to 0.24"):
        Server.start(ServeRecipe("stub", port=port))
    assert serving.status(port) == []
    Server.start(ServeRecipe("stub", port=port, gpu_memory_utilization=0.2))


def test_the_last_start_s_time_is_told_and_joining_a_ready_server_does_not_spoil_it(stub, port, capsys):
    from qrecipe.progress import StartProgress

    stub["load"] = "1"
    Server.start(ServeRecipe("stub", port=port), on_progress=StartProgress("cpu"))
    took = StartProgress("cpu").last
    assert 1 < took < 20
    Server.start(ServeRecipe("stub", port=port), on_progress=StartProgress("cpu"))
    assert StartProgress("cpu").last == took
    assert "joined the server that was ready" in capsys.readouterr().err


def test_ranks_need_cards_of_one_size_each(stub, port, monkeypatch):
    cards = "0, 81000, 81920\n1, 24000, 24564\n"
    monkeypatch.setattr("qrecipe.facts._output", lambda *words: cards)
    with pytest.raises(BadInput, match="3 ranks are asked for and 2 GPUs are here"):
        check_gpus(0.9, 3)
    with pytest.raises(BadInput, match="first 2 GPUs have 80, 24 GiB.*CUDA_VISIBLE_DEVICES"):
        check_gpus(0.9, 2)
    check_gpus(0.9, 1)


def test_heads_that_cannot_be_divided_are_refused_with_the_sizes_that_can(port, tmp_path):
    from qrecipe.teaching_model import build

    recipe = ServeRecipe(str(build(tmp_path / "model")), port=port, tensor_parallel_size=3)
    with pytest.raises(BadInput, match=r"tensor_parallel_size 3 does not divide the .* heads.*use one of \[1, 2\]"):
        Server.start(recipe)


def test_the_cpu_engine_is_not_started_over_ray(port):
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "RAY_ADDRESS": f"127.0.0.1:{port}"}
    with pytest.raises(BadInput, match="CPU engine does not run over Ray"):
        check_start(ServeRecipe("OWNER/NAME", port=port, env=env))


def test_a_ray_head_that_does_not_answer_is_one_sentence(port, monkeypatch):
    for address in (f"127.0.0.1:{port}", "nowhere.invalid:6379", "6379", "", "127.0.0.1:x"):
        with pytest.raises(BadInput, match="no Ray head answers at .*ray start --head"):
            check_head(address)
    with socket.socket() as s:
        s.bind(("127.0.0.1", port))
        s.listen()
        monkeypatch.setattr("qrecipe.start_checks.find_spec", lambda name: None)
        with pytest.raises(BadInput, match="uv pip install ray"):
            check_head(f"127.0.0.1:{port}")


def test_a_key_pasted_with_its_line_s_end_is_the_same_key_for_server_and_client(monkeypatch, tmp_path):
    from qrecipe.start_checks import given_key, key_for

    monkeypatch.setenv("VLLM_API_KEY", " abc\n")
    assert given_key() == "abc" == key_for(ServeRecipe("/model"), tmp_path, False)
    monkeypatch.setenv("VLLM_API_KEY", "EMPTY")
    assert given_key() == ""
