"""What holds for the whole tree: a light import, notebooks without outputs and in the book's form, nothing of one machine."""

import re
import subprocess
import sys
import tomllib

import nbformat
import pytest
import yaml
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
TEXT = [p for p in TRACKED if re.search(r"\.(py|md|toml|yml|txt|in|sh|ipynb|json|jsonl|log)$|Makefile|run$", p)]


def test_importing_the_package_and_sizing_a_card_load_nothing_heavy():
    code = (
        "import sys, qrecipe; qrecipe.budget('Qwen3.5-4B', gpu='H200')\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'pandas', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.strip() == "[]"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_has_the_book_s_form(path):
    nb = nbformat.read(path, as_version=4)
    nbformat.validate(nb)
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert not any(c.outputs or c.execution_count for c in code)
    assert len([c for c in code if "parameters" in c.metadata.get("tags", [])]) == 1
    assert len({c.id for c in nb.cells}) == len(nb.cells)
    assert nb.cells[0].cell_type == "markdown" and nb.cells[0].source.startswith("# ")
    assert f'qrecipe.begin(\n    "{path.stem}"' in nb.cells[2].source
    assert "qrecipe.finish(" in code[-1].source
    for cell in code:
        lines = cell.source.splitlines()
        assert len(lines) <= 20 and max(map(len, lines)) <= 78, cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_takes_the_common_parameters(path):
    from qrecipe.book import known_parameters

    common = {"engine": "auto", "model": "auto", "weights": "real", "base_url": "", "port": 8000}
    assert common.items() <= known_parameters(path).items()


@pytest.mark.skipif(not TRACKED, reason="no git checkout")
def test_nothing_of_one_machine_is_kept():
    private = re.compile(
        r"/(?:root|home/(?!me/)[a-z]+|tmp/w)/[A-Za-z.]|--(?:extra-)?index-url[ =]http|BEGIN [A-Z ]*PRIVATE KEY"
    )
    for name in TEXT:
        found = private.search((ROOT / name).read_text(errors="replace")) if name != "tests/test_package.py" else None
        assert found is None, (name, found)


@pytest.mark.skipif(not TRACKED, reason="no git checkout")
def test_files_stay_small():
    for name in TRACKED:
        size = (ROOT / name).stat().st_size
        assert size < 4_000_000, (name, size)
        if name.startswith("qrecipe/") and name.endswith(".py"):
            assert len((ROOT / name).read_text().splitlines()) <= 450, name


def test_the_locks_are_hashed_and_name_no_index():
    for name in ("cpu", "gpu", "uv"):
        lock = (ROOT / "requirements" / f"{name}.txt").read_text()
        pinned = re.findall(r"^[a-z0-9._-]+(?:\[[a-z,-]+\])?==\S+.* \\$", lock, re.M)
        assert len(pinned) == len(re.findall(r"^[a-z0-9]", lock, re.M)) > 0
        assert lock.count("--hash=sha256:") >= len(pinned) and "http" not in re.sub(
            r"(?m)^\S*http\S*==|# .*$|^ +#.*$", "", lock
        )


def test_the_conda_environment_brings_what_the_set_up_needs_and_nothing_that_the_locks_bring():
    """Its form and pins. py-rattler 0.28.0 reads each entry as a MatchSpec (2026-11-30); to solve them takes a channel."""
    env = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert sorted(env) == ["channels", "dependencies", "name"] and env["channels"] == ["conda-forge"]
    given = dict(re.fullmatch(r"([a-z0-9-]+)(?:=(\d+\.\d+))?", word).groups() for word in env["dependencies"])
    assert {"python", "make", "curl", "git"} <= set(given)  # README: what a fresh machine must have
    assert Version(given["python"]) in SpecifierSet(PROJECT["requires-python"])
    locked = re.findall(r"^[a-z0-9._-]+", (ROOT / "requirements/cpu.txt").read_text(), re.M)
    assert set(given).isdisjoint(locked)


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_the_lock_pins_what_the_project_asks_for(engine):
    lock = (ROOT / f"requirements/{engine}.txt").read_text()
    pins = dict(re.findall(r"^([a-z0-9._-]+)(?:\[.*\])?==([^\s;]+)", lock, re.M))
    extras = PROJECT["optional-dependencies"]
    for asked in map(Requirement, PROJECT["dependencies"] + extras["book"] + extras[engine] + extras["test"]):
        assert Version(pins[asked.name]) in asked.specifier, (asked, pins[asked.name])
