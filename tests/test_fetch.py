"""Model folders checked, and models fetched with the hubs' real clients from a local server that drops connections."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub

from qrecipe.errors import BadInput
from qrecipe.fetch import find_model
from qrecipe.model_folder import check_folder, require_folder, revision_of, sha256, weight_hashes

ROOT = Path(__file__).parent.parent
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def safetensors_bytes(names, size):
    header = {n: {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]} for i, n in enumerate(names)}
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
    assert found.complete and found.missing == () and found.revision is None and found.source == "folder"
    assert found.bytes == sum((folder / name).stat().st_size for name in SHARDS)


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
    "cut inside the header": (lambda f: os.truncate(f / SHARDS[1], 20), "inside its header"),
    "cut inside the length": (lambda f: os.truncate(f / SHARDS[1], 5), "inside its header"),
    "empty": (lambda f: os.truncate(f / SHARDS[1], 0), "empty"),
    "too long": (lambda f: (f / SHARDS[1]).write_bytes((f / SHARDS[1]).read_bytes() + b"x"), "too long"),
    "a damaged header": (lambda f: (f / SHARDS[1]).write_bytes((40).to_bytes(8, "little") + b"\xff" * 60), "damaged"),
    "a header that is a list": (lambda f: (f / SHARDS[1]).write_bytes((2).to_bytes(8, "little") + b"[]"), "damaged"),
    "the other shard's tensors": (lambda f: shutil.copy(f / SHARDS[0], f / SHARDS[1]), "1 tensors"),
    "a Git LFS pointer": (lambda f: (f / SHARDS[0]).write_text("version https://git-lfs.invalid/spec/v1\noid sha256:00\nsize 9\n"), "Git LFS"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "an empty tokenizer": (lambda f: os.truncate(f / "tokenizer.json", 0), "tokenizer.json"),
    "shards without their index": (lambda f: (f / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "weights"),
    "an index that leads outside": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}'), "plain file name",
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


@pytest.mark.parametrize("model", ["/absent/model", "./absent", "~/absent", "no model", "", "a/b/c", "../x", "Qwen/", "Qwen3.5-4B"])
def test_what_is_no_model_is_one_sentence(model):
    with pytest.raises(BadInput) as e:
        find_model(model)
    assert "\n" not in str(e.value)


def test_a_file_is_no_model_folder(folder):
    with pytest.raises(BadInput, match="is a file, not a model folder"):
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


def test_weight_hashes_are_those_of_the_files(folder):
    assert weight_hashes(folder) == {name: sha256(folder / name) for name in SHARDS}


# -- the hubs, by their real clients in a process of their own (they read their settings when they are imported)


@pytest.fixture
def hub():
    server = Hub(model_files())
    yield server
    server.close()


CALL = """
import json, sys
from qrecipe.errors import BadInput
from qrecipe.fetch import find_model
try:
    found = find_model(sys.argv[1], **json.loads(sys.argv[2]))
    print(json.dumps({"path": str(found.path), "revision": found.revision, "source": found.source, "bytes": found.bytes}))
except BadInput as e:
    print(json.dumps({"error": str(e)}))
"""


def fetch(tmp_path, model="Qwen/Tiny", env=None, **arguments):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "MODELSCOPE_", "TRANSFORMERS_", "VLLM_")) and "proxy" not in k.lower()}
    clean |= {"HF_HOME": str(tmp_path / "hf"), "MODELSCOPE_CACHE": str(tmp_path / "ms"), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-c", CALL, model, json.dumps(arguments)], capture_output=True, text=True, env=clean | (env or {}), timeout=120
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def hf(hub, **more):
    return {"HF_ENDPOINT": hub.url, **more}


def ms(hub, **more):
    return {"MODELSCOPE_ENDPOINT": hub.url, **more}


def same(path, hub):
    return all((Path(path) / name).read_bytes() == body for name, body in hub.files.items())


def test_hugging_face_is_fetched_whole_and_its_commit_recorded(hub, tmp_path):
    found = fetch(tmp_path, env=hf(hub))
    assert found["revision"] == COMMIT and found["source"] == "huggingface" and same(found["path"], hub)


def test_hugging_face_goes_on_where_the_connection_broke(hub, tmp_path):
    hub.files = model_files(12_000_000)  # the client keeps what has come in pieces of 10 MiB
    hub.drops = {SHARDS[0]: 2, SHARDS[1]: 1}
    found = fetch(tmp_path, env=hf(hub))
    assert same(found["path"], hub)
    assert len(hub.served[SHARDS[0]]) == 3 and sorted(hub.served[SHARDS[0]])[1] > 0  # by Range, not from the start


def test_a_cached_model_needs_no_hub(hub, tmp_path):
    first = fetch(tmp_path, env=hf(hub))
    asked = len(hub.requests)
    again = fetch(tmp_path, env=hf(hub, HF_HUB_OFFLINE="1"))
    online = fetch(tmp_path, env=hf(hub))
    assert first["path"] == again["path"] == online["path"] and again["revision"] == COMMIT
    assert again["source"] == "huggingface cache" and len(hub.requests) == asked


def test_a_pinned_commit_is_found_in_the_cache_and_another_is_not(hub, tmp_path):
    fetch(tmp_path, env=hf(hub))
    assert fetch(tmp_path, env=hf(hub, HF_HUB_OFFLINE="1"), revision=COMMIT)["revision"] == COMMIT
    assert "HF_HUB_OFFLINE" in fetch(tmp_path, env=hf(hub, HF_HUB_OFFLINE="1"), revision="f" * 40)["error"]


def test_a_hole_in_the_cache_is_filled(hub, tmp_path):
    path = Path(fetch(tmp_path, env=hf(hub))["path"])
    (path / SHARDS[1]).resolve().unlink()
    (path / SHARDS[1]).unlink()
    assert "HF_HUB_OFFLINE" in fetch(tmp_path, env=hf(hub, HF_HUB_OFFLINE="1"))["error"]
    assert same(fetch(tmp_path, env=hf(hub))["path"], hub)


def test_a_file_with_another_hash_is_refused_and_removed(hub, tmp_path):
    hub.spoil = {SHARDS[1]}
    error = fetch(tmp_path, env=hf(hub))["error"]
    assert SHARDS[1] in error and "sha256" in error
    hub.spoil = set()
    assert same(fetch(tmp_path, env=hf(hub))["path"], hub)


def test_an_unknown_model_or_revision_is_one_sentence(hub, tmp_path):
    assert "Qwen/Absent" in fetch(tmp_path, model="Qwen/Absent", env=hf(hub))["error"]
    assert "nope" in fetch(tmp_path, env=hf(hub), revision="nope")["error"]


def test_dummy_weights_are_not_fetched(hub, tmp_path):
    found = fetch(tmp_path, env=hf(hub), weights=False)
    assert not any(name in hub.served for name in SHARDS) and (Path(found["path"]) / "config.json").exists()


def test_modelscope_is_fetched_and_goes_on_where_the_connection_broke(hub, tmp_path):
    hub.drops = {SHARDS[0]: 1}
    found = fetch(tmp_path, env=ms(hub), source="modelscope")
    assert found["source"] == "modelscope" and same(found["path"], hub) and max(hub.served[SHARDS[0]]) > 0
    asked = len(hub.requests)
    again = fetch(tmp_path, env=ms(hub, HF_HUB_OFFLINE="1"))
    assert again["source"] == "modelscope cache" and again["path"] == found["path"] and len(hub.requests) == asked


def test_vllms_own_switch_chooses_modelscope(hub, tmp_path):
    assert fetch(tmp_path, env=ms(hub, VLLM_USE_MODELSCOPE="True"))["source"] == "modelscope"
    assert "Qwen/Absent" in fetch(tmp_path, model="Qwen/Absent", env=ms(hub), source="modelscope")["error"]


@pytest.mark.parametrize("source, setting", [("huggingface", "HF_ENDPOINT"), ("modelscope", "MODELSCOPE_ENDPOINT")])
def test_an_unreachable_hub_is_said_in_bounded_time(tmp_path, source, setting):
    began = time.monotonic()
    error = fetch(tmp_path, env={setting: "http://127.0.0.1:9"}, source=source)["error"]
    assert time.monotonic() - began < 10 and setting in error and "folder" in error


def test_a_hub_that_swallows_packets_is_said_in_bounded_time(tmp_path):
    import socket

    with socket.socket() as silent:  # it accepts and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        error = fetch(tmp_path, env={"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"})["error"]
    assert time.monotonic() - began < 13 and "cannot be reached" in error


def test_a_full_disk_is_known_before_the_download(hub, tmp_path):
    hub.files["model.safetensors"] = b""
    original = Hub.entry
    hub.entry = lambda name, key, h: {**original(hub, name, key, h), **({"size": 10**15} if name == SHARDS[0] else {})}
    error = fetch(tmp_path, env=hf(hub))["error"]
    assert "GiB are free" in error and "HF_HOME" in error and not hub.served
