"""Model folders checked, and models fetched with the hubs' real clients from a local server that drops connections."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub

from qrecipe.errors import BadInput
from qrecipe.fetch import check_folder, find_model, require_folder, revision_of

ROOT = Path(__file__).parent.parent
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def safetensors_bytes(names, size):
    header = {
        n: {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]} for i, n in enumerate(names)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(i % 251 for i in range(size)) * len(names)


def model_files(size=200_000):
    index = {"metadata": {"total_size": 3 * size}, "weight_map": {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}}
    return {
        "config.json": json.dumps({"model_type": "qwen3_5", "vision_config": {"depth": 2}}).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "preprocessor_config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[0]: safetensors_bytes(["a", "b"], size),
        SHARDS[1]: safetensors_bytes(["c"], size),
    }


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    for name, body in model_files().items():
        (path / name).write_bytes(body)
    return path


# -- folders


def test_a_whole_folder_is_complete_and_counts_its_weights(folder):
    found = find_model(str(folder))
    assert found.complete and found.missing == () and found.revision is None
    assert found.gib == sum((folder / name).stat().st_size for name in SHARDS) / 2**30


def test_a_single_file_without_index_is_complete(folder):
    for name in (*SHARDS, "model.safetensors.index.json"):
        (folder / name).unlink()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(["a"], 10))
    assert check_folder(folder).complete


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "preprocessor_config.json", *SHARDS])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert check_folder(folder).missing == (name,)
    with pytest.raises(BadInput, match=name):
        find_model(str(folder))


def cut(path, by):
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size - by)


DAMAGE = {
    "one byte short": (lambda f: cut(f / SHARDS[1], 1), "cut"),
    "cut inside the header": (lambda f: os.truncate(f / SHARDS[1], 20), "header"),
    "cut inside the length": (lambda f: os.truncate(f / SHARDS[1], 5), "header"),
    "empty": (lambda f: os.truncate(f / SHARDS[1], 0), "empty"),
    "too long": (lambda f: (f / SHARDS[1]).write_bytes((f / SHARDS[1]).read_bytes() + b"x"), "too long"),
    "a damaged header": (lambda f: (f / SHARDS[1]).write_bytes((40).to_bytes(8, "little") + b"\xff" * 60), "damaged"),
    "a header that is a list": (lambda f: (f / SHARDS[1]).write_bytes((2).to_bytes(8, "little") + b"[]"), "damaged"),
    "a Git LFS pointer": (lambda f: (f / SHARDS[0]).write_text("version https://git-lfs.invalid/spec/v1\noid sha256:00\nsize 9\n"), "Git LFS"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "an empty tokenizer": (lambda f: os.truncate(f / "tokenizer.json", 0), "tokenizer.json"),
    "shards without their index": (lambda f: (f / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "weights"),
    "an index that leads outside": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}'), "passwd",
    ),
    "an index without a map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "weight_map"),
    "a configuration that is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "a configuration of another kind": (lambda f: (f / "config.json").write_text("{}"), "model_type"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_named(folder, what):
    damage, words = DAMAGE[what]
    damage(folder)
    found = check_folder(folder)
    assert not found.complete and any(words in phrase for phrase in found.missing), found.missing
    with pytest.raises(BadInput) as e:
        require_folder(folder)
    assert "\n" not in str(e.value) and words in str(e.value)


def test_every_length_of_a_cut_file_is_found(folder):
    whole = (folder / SHARDS[1]).read_bytes()[:0] + safetensors_bytes(["c"], 40)
    (folder / SHARDS[1]).write_bytes(whole)
    assert check_folder(folder).complete
    for length in range(len(whole)):
        (folder / SHARDS[1]).write_bytes(whole[:length])
        assert not check_folder(folder).complete, length


def test_dummy_weights_need_no_weight_files(folder):
    for name in (*SHARDS, "model.safetensors.index.json"):
        (folder / name).unlink()
    assert not check_folder(folder).complete and check_folder(folder, weights=False).complete


@pytest.mark.parametrize(
    "model", ["/absent/model", "./absent", "~/absent", "no model", "", "a/b/c", "../x", "Qwen/", "Qwen3.5-4B"]
)
def test_what_is_no_model_is_one_sentence(model):
    with pytest.raises(BadInput) as e:
        find_model(model)
    assert "\n" not in str(e.value)


def test_a_file_is_no_model_folder(folder):
    with pytest.raises(BadInput, match="this is a file"):
        find_model(str(folder / "config.json"))


def test_an_unknown_source_is_refused():
    with pytest.raises(BadInput, match="auto, huggingface, modelscope"):
        find_model("Qwen/Qwen3.5-4B", source="huggingfase")


def test_a_download_into_a_folder_tells_its_commit(folder):
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "config.json.metadata").write_text(f"{COMMIT}\netag\n1.0\n")
    assert revision_of(folder) == COMMIT
    assert find_model(str(folder), revision=COMMIT).revision == COMMIT
    with pytest.raises(BadInput, match=COMMIT):
        find_model(str(folder), revision="f" * 40)


# -- the hubs, by their real clients: one worker imports them, each test is a fork of it with settings of its own


@pytest.fixture
def hub():
    server = Hub(model_files())
    yield server
    server.close()


WORKER = """
import importlib, json, os, sys
import huggingface_hub._snapshot_download, modelscope_hub.api, safetensors
from huggingface_hub import HfApi, constants
from qrecipe import fetch
from qrecipe.errors import BadInput

def answer(model, arguments):
    constants.HF_HUB_OFFLINE = arguments.pop("offline", False)
    try:
        found = fetch.find_model(model, **arguments)
        return {"path": str(found.path), "revision": found.revision}
    except BadInput as e:
        return {"error": str(e)}

for line in sys.stdin:
    job = json.loads(line)
    if os.fork() == 0:
        os.environ.update(job["env"])
        importlib.reload(constants)  # it has read the environment at its import
        constants.DOWNLOAD_CHUNK_SIZE = 50_000  # what has come is kept in pieces of this size
        fetch.ANSWER_S = 1.0
        print(json.dumps([answer(*call) for call in job["calls"]]), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("null", flush=True)
"""


@pytest.fixture(scope="module")
def worker():
    settings = ("HF_", "MODELSCOPE_", "TRANSFORMERS_", "VLLM_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(settings) and "proxy" not in k.lower()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WORKER], env=clean | {"PYTHONPATH": str(ROOT)}, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def fetch_each(worker, tmp_path):
    """Calls (model, arguments) one after another in one process, with a home and caches of its own."""

    def fetch(env, *calls):
        caches = {"HF_HOME": str(tmp_path / "hf"), "MODELSCOPE_CACHE": str(tmp_path / "ms"), "HOME": str(tmp_path)}
        worker.stdin.write(json.dumps({"env": caches | env, "calls": calls}) + "\n")
        worker.stdin.flush()
        while not (line := worker.stdout.readline()).startswith(("[", "null")):
            assert line, "the worker has ended"
        answers = json.loads(line)
        assert all("error" in said or Path(said["path"]).is_relative_to(tmp_path) for said in answers)
        return answers

    return fetch


def hf(hub, **more):
    return {"HF_ENDPOINT": hub.url, **more}


def ms(hub, **more):
    return {"MODELSCOPE_ENDPOINT": hub.url, **more}


def same(path, hub):
    return all((Path(path) / name).read_bytes() == body for name, body in hub.files.items())


def test_hugging_face_is_fetched_whole_then_taken_from_the_cache(hub, fetch_each):
    arguments = [
        {},
        {},
        {"offline": True},
        {"offline": True, "revision": COMMIT},
        {"offline": True, "revision": "f" * 40},
    ]
    found, *again, other = fetch_each(hf(hub), *(("Qwen/Tiny", given) for given in arguments))
    assert found["revision"] == COMMIT and "hf" in Path(found["path"]).parts and same(found["path"], hub)
    assert again == [found] * 3 and hub.requests.count("HEAD /") == 1 and "HF_HUB_OFFLINE" in other["error"]


def test_hugging_face_goes_on_where_the_connection_broke(hub, fetch_each):
    hub.drops = {SHARDS[0]: 2, SHARDS[1]: 1}
    found = fetch_each(hf(hub), ("Qwen/Tiny", {}))[0]
    assert same(found["path"], hub)
    assert len(hub.served[SHARDS[0]]) == 3 and sorted(hub.served[SHARDS[0]])[1] > 0  # by Range, not from the start


def test_a_file_with_another_hash_is_refused_and_the_hole_filled_by_the_next_call(hub, fetch_each):
    hub.spoil = {SHARDS[1]: 1}
    calls = [("Qwen/Tiny", {}), ("Qwen/Tiny", {"offline": True}), ("Qwen/Tiny", {})]
    refused, offline, found = fetch_each(hf(hub), *calls)
    assert SHARDS[1] in refused["error"] and "sha256" in refused["error"] and "HF_HUB_OFFLINE" in offline["error"]
    assert same(found["path"], hub) and len(hub.served[SHARDS[1]]) == 2 and len(hub.served[SHARDS[0]]) == 1


def test_an_unknown_model_or_revision_is_one_sentence_and_dummy_weights_are_not_fetched(hub, fetch_each):
    calls = [("Qwen/Absent", {}), ("Qwen/Tiny", {"revision": "nope"}), ("Qwen/Tiny", {"weights": False})]
    absent, revision, dummy = fetch_each(hf(hub), *calls)
    assert "Qwen/Absent" in absent["error"] and "nope" in revision["error"]
    assert not any(name in hub.served for name in SHARDS) and (Path(dummy["path"]) / "config.json").exists()


def test_modelscope_is_fetched_and_goes_on_where_the_connection_broke(hub, fetch_each):
    hub.drops = {SHARDS[0]: 1}
    calls = [("Qwen/Tiny", {}), ("Qwen/Tiny", {"offline": True, "source": "modelscope"}), ("Qwen/Absent", {})]
    found, again, absent = fetch_each(ms(hub, VLLM_USE_MODELSCOPE="True"), *calls)  # vLLM's own switch
    assert "ms" in Path(found["path"]).parts and same(found["path"], hub) and max(hub.served[SHARDS[0]]) > 0
    assert again == found and "Qwen/Absent" in absent["error"] and hub.requests.count("HEAD /") == 2


def test_a_hub_that_refuses_or_swallows_is_said_in_bounded_time(fetch_each):
    with socket.socket() as silent:  # it accepts and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        env = {
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "MODELSCOPE_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        began = time.monotonic()
        calls = [("Qwen/Tiny", {"source": source}) for source in ("huggingface", "modelscope")]
        refused, swallowed = fetch_each(env, *calls)
    assert time.monotonic() - began < 10 and "refused" in refused["error"] and "timed out" in swallowed["error"]
    assert "HF_ENDPOINT" in refused["error"] and "MODELSCOPE_ENDPOINT" in swallowed["error"]
    assert all("cannot be fetched" in said["error"] and "folder" in said["error"] for said in (refused, swallowed))
