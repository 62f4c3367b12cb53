"""The workflow files, read by a schema of what they may hold and by what their commands need."""

import copy
import json
import re
import shlex
import subprocess

import jsonschema
import pytest
import yaml
from conftest import ROOT

from qrecipe.book import find_notebooks
from qrecipe.cli import app

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCHEMA = json.loads((ROOT / "tests/data/workflow.schema.json").read_text())
CONTEXTS = ("github", "matrix", "runner", "env", "vars", "hashFiles")


def read(file) -> dict:
    """Every scalar as text: `on` is a word and not a truth value."""
    return yaml.load(file.read_text(), Loader=yaml.BaseLoader)


def faults(workflow: dict) -> list[str]:
    """What is wrong with a workflow: schema, jobs that are not there, unknown contexts, values pasted into scripts, bad bash."""
    found = [e.message for e in jsonschema.Draft202012Validator(SCHEMA).iter_errors(workflow)]
    if found:
        return found
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        found += [f"{name} needs {n}" for n in ([needs] if isinstance(needs, str) else needs) if n not in jobs]
        matrix = job.get("strategy", {}).get("matrix", {})
        for inner in re.findall(r"\$\{\{(.*?)\}\}", json.dumps([job, workflow.get("env")])):
            head = re.match(r"\s*([A-Za-z]+)(?:\.([A-Za-z_-]+))?", inner)
            if not head or head[1] not in CONTEXTS or (head[1] == "matrix" and head[2] not in matrix):
                found.append(f"unknown {inner.strip()}")
        for step in job["steps"]:
            if script := step.get("run"):
                if "${{" in script:
                    found.append(f"a value is pasted into the script of {step['name']}")
                done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
                found += [done.stderr] if done.returncode else []
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_workflow_is_well_formed(file):
    assert faults(read(file)) == []


@pytest.mark.parametrize(
    "harm",
    [
        lambda w, job: w.pop("on"),
        lambda w, job: w.pop("defaults"),
        lambda w, job: w["permissions"].update(contents="write"),
        lambda w, job: job.pop("timeout-minutes"),
        lambda w, job: job.update({"runs_on": "x"}),
        lambda w, job: job.update(needs="nobody"),
        lambda w, job: job["steps"][0].update(uses="actions/checkout@main"),
        lambda w, job: job["steps"][0].update(run="true"),
        lambda w, job: job["steps"].append({"name": "x", "run": "echo ${{ github.head_ref }}"}),
        lambda w, job: job["steps"].append({"name": "x", "run": "if true; then"}),
        lambda w, job: job["steps"].append({"name": "x", "run": "true", "if": "${{ secret.KEY }}"}),
    ],
    ids=range(11),
)
def test_a_harmed_workflow_is_seen(harm):
    workflow = copy.deepcopy(read(FILES[0]))
    harm(workflow, next(iter(workflow["jobs"].values())))
    assert faults(workflow)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_its_commands_are_there(file):
    text = file.read_text()
    commands = {c.name or c.callback.__name__ for c in app.registered_commands}
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"bin/qrecipe ([a-z-]+)", text)) <= commands
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    assert not re.search(r"index-url|https?://", text)


def test_artifacts_and_reaping_come_whatever_happened():
    for file in FILES:
        for job in read(file)["jobs"].values():
            last = [
                s for s in job["steps"] if "upload-artifact" in s.get("uses", "") or "stop --all" in s.get("run", "")
            ]
            assert len(last) == 2 and all(s["if"] == "always()" for s in last)


def test_the_nightly_has_a_job_that_may_fail():
    jobs = read(ROOT / ".github/workflows/nightly-gpu.yml")["jobs"]
    assert jobs["newest"]["continue-on-error"] == "true" and "continue-on-error" not in jobs["book"]


def test_the_nightly_runs_the_chapters_and_parameters_of_the_landed_run():
    """From requirements/gpu.txt, all chapters, nothing set but engine, weights and port; and it says that it was not tried."""
    file = ROOT / ".github/workflows/nightly-gpu.yml"
    steps = {step.get("name"): step.get("run", "") for step in read(file)["jobs"]["book"]["steps"]}
    *words, p, name, value = shlex.split(steps["The book"].removeprefix("exec ").partition(" > ")[0])
    assert words[:2] == [".venv/bin/qrecipe", "run"] and (p, name, value) == ("-p", "port", "$PORT")
    given = dict(zip(words[2::2], words[3::2], strict=True))  # options only: no chapter is named, so all are run
    assert (given.pop("--engine"), given.pop("--weights")) == ("gpu", "$WEIGHTS")
    assert set(given) == {"--timeout", "--cell-timeout", "--out", "--publish"}
    landed = json.loads((ROOT / "gallery/h200/run.json").read_text())
    assert sorted(c["name"] for c in landed["chapters"]) == [p.stem for p in find_notebooks([])]
    assert "make setup ENGINE=gpu" in steps["Set-up"] and (ROOT / "requirements/gpu.txt").is_file()
    assert "NOT TRIED" in file.read_text().splitlines()[0]
