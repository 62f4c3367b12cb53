"""The nightly's own steps, run as a runner runs them, with a GPU, a set-up and a book that are told how to end."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ROOT, free_port

JOBS = yaml.load((ROOT / ".github/workflows/nightly-gpu.yml").read_text(), Loader=yaml.BaseLoader)["jobs"]
SMI = """case "$*" in *query*) printf '%s' "$BUSY" ;; *) echo NVIDIA-SMI ;; esac; exit ${SMI:-0}"""
MAKE = 'if [ "$HOW" = "no set-up" ]; then echo "set-up: no network"; exit 2; fi'
QRECIPE = f"""
if [ "$1 $HOW" = "run cancelled" ]; then exec {sys.executable} -c "
import signal, time, pathlib
signal.signal(signal.SIGINT, lambda *_: [pathlib.Path('artifacts/ended').touch(), exit(130)])
pathlib.Path('artifacts/begun').touch()
time.sleep(60)"; fi
if [ "$1 $HOW" = "run refused" ]; then echo "qrecipe: unknown card"; exit 2; fi
if [ "$1" = run ]; then mkdir -p artifacts/run; cp {ROOT}/gallery/cpu/*.json {ROOT}/gallery/cpu/summary.md artifacts/run; exit $BOOK; fi
if [ "$1" = report ]; then exec {sys.executable} -m qrecipe.cli "$@"; fi
echo "qrecipe $*"
"""


@pytest.fixture
def job(tmp_path):
    """Runs a job's scripts: ({step: exit code, of those that were run}, the job's summary)."""
    for name, text in (("bin/nvidia-smi", SMI), ("bin/make", MAKE), ("work/.venv/bin/qrecipe", QRECIPE)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    told, summary = tmp_path / "env", tmp_path / "summary"
    env = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PORT": str(free_port()),
    }
    env |= {
        "GITHUB_ENV": str(told),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_RUN_ID": "1",
        "WEIGHTS": "real",
        "BOOK": "0",
    }

    def job(name="book", **more):
        codes, good, cancelled = {}, True, False
        for step in (s for s in JOBS[name]["steps"] if "run" in s and "newest" not in s["name"]):
            if not (good and not cancelled or step.get("if") == "always()"):
                continue
            (tmp_path / "step.sh").write_text(step["run"])
            kept = dict(line.split("=", 1) for line in told.read_text().splitlines()) if told.exists() else {}
            process = subprocess.Popen(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", tmp_path / "step.sh"],
                cwd=tmp_path / "work", env=env | kept | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if step["name"] == "The book" and more.get("HOW") == "cancelled":
                while not (tmp_path / "work/artifacts/begun").exists():
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)  # a runner signals the step's own process, and no other
                cancelled = True
            process.communicate(timeout=20)
            codes[step["name"]] = process.returncode
            good = good and process.returncode == 0
        return codes, summary.read_text() if summary.exists() else ""

    job.env, job.work = env, tmp_path / "work"
    return job


def test_a_good_night(job):
    codes, summary = job()
    assert set(codes.values()) == {0} and len(codes) == 7
    assert summary.startswith("## qrecipe run passed") and "no regression\n1 runs; report: artifacts/nights/" in summary
    assert (job.work / "artifacts/nights/nights.html").is_file()
    assert set(job("newest")[0].values()) == {0}


@pytest.mark.parametrize(
    "more, ran, said",
    [
        ({"BUSY": "4242, python, 9000 MiB"}, False, "the GPU is in use: 4242, python, 9000 MiB"),
        ({"SMI": "9"}, False, "NVIDIA-SMI"),
        ({"HOW": "no set-up"}, False, "set-up: no network"),
        ({"HOW": "refused"}, True, "qrecipe: unknown card"),
        ({"BOOK": "1"}, True, "no regression"),
    ],
)
def test_a_bad_night_says_in_its_summary_what_happened_and_reaps(job, more, ran, said):
    codes, summary = job(**more)
    assert ("The book" in codes) == ran and max(codes.values()) > 0
    assert {"Nothing is left running", "What was installed", "Held against the nights before"} <= codes.keys()
    assert said in summary and (("not run to its end" in summary) == ("BOOK" not in more))


def test_a_port_that_is_taken(job):
    with socket.create_server(("127.0.0.1", int(job.env["PORT"]))):
        codes, summary = job()
    assert "The book" not in codes and "Address already in use" in summary


@pytest.mark.parametrize("more", [{"BUSY": "1"}, {"SMI": "9"}])
def test_the_newest_versions_wait_for_no_busy_gpu_either(job, more):
    assert "The book" not in job("newest", **more)[0]


def test_a_cancelled_night_ends_the_run_itself_and_starts_no_other(job):
    codes, summary = job(HOW="cancelled")
    assert codes["The book"] == 130 and (job.work / "artifacts/ended").exists()
    assert codes["Nothing is left running"] == 0 and "not run to its end" in summary
    assert JOBS["newest"]["if"] == "!cancelled()"
