"""The landed runs: executed whole, stamped, in agreement with their own server log, naming no machine; README's numbers are theirs.

After another run has been landed (gallery/README.md has the commands), `python tests/test_gallery.py` writes what is
held here into the READMEs and cuts the picture out anew.
"""

import base64
import json
import re
from pathlib import Path

import nbformat
import pytest

from qrecipe.memory import budget
from qrecipe.startup_log import read_log

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "gallery"
RUNS = {p.parent.name: json.loads(p.read_text(encoding="utf-8")) for p in sorted(GALLERY.glob("*/run.json"))}
CHAPTERS = sorted(p.stem for p in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "gallery/README.md")}
each = pytest.mark.parametrize("name", RUNS)


def notebooks(name):
    return {stem: nbformat.read(GALLERY / name / f"{stem}.ipynb", as_version=4) for stem in CHAPTERS}


def measured(name, chapter, figure):
    found = next(c for c in RUNS[name]["chapters"] if c["name"] == chapter)
    return found["measured"][figure]["value"]


def test_the_reference_runs_are_there():
    assert set(RUNS) == {"cpu", "h200"}


@each
def test_every_chapter_passed_and_every_cell_was_run(name):
    assert RUNS[name]["passed"] and {c["status"] for c in RUNS[name]["chapters"]} == {"passed"}
    assert set(CHAPTERS) == {c["name"] for c in RUNS[name]["chapters"]}
    assert {p.stem for p in (GALLERY / name).glob("*.ipynb")} == set(CHAPTERS)
    for stem, nb in notebooks(name).items():
        code = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
        assert code and all(c.execution_count for c in code), stem
        assert not any(o.output_type == "error" for c in code for o in c.outputs), stem


@each
def test_every_page_says_what_it_ran_on(name):
    run = RUNS[name]
    for stem, nb in notebooks(name).items():
        stamp = nb.cells[1].source
        for said in (run["device"], run["date"][:10], *(f"{k} {v}" for k, v in run["versions"].items())):
            assert said in stamp, (stem, said)
        assert ("Dummy weights" in stamp) == (run["weights"] == "dummy")
    page = (GALLERY / name / "index.html").read_text(encoding="utf-8")
    assert all(f'id="{stem}"' in page for stem in CHAPTERS) and run["device"] in page
    assert len(page) < 3_000_000  # characters; a page that a phone opens


def test_the_gpu_run_says_that_it_did_not_run_the_gpu_lock():
    run = RUNS["h200"]
    assert run["engine"] == "gpu" and run["weights"] == "dummy" and "driver" in run["reason"]
    assert run["lock_sha256"] is None and any(d.startswith("torch ") for d in run["lock_departures"])
    assert all(word in run["note"] for word in ("0.23.0", "2.11", "triton"))


@each
def test_the_figures_are_those_of_the_server_log(name):
    assert [p.name for p in (GALLERY / name).glob("server-*.log")] == [RUNS[name]["server"]["log"]]
    log = read_log(GALLERY / name / RUNS[name]["server"]["log"])
    assert log.ready and log.failure is None
    assert measured(name, "04_read_memory_profile", "KV cache, tokens") == log.kv_cache_tokens
    if name == "h200":
        assert measured(name, "04_read_memory_profile", "weights") == log.weights_gib
        assert measured(name, "04_read_memory_profile", "KV cache") == log.available_kv_gib


@each
def test_no_file_names_a_machine_or_is_large(name):
    for file in (GALLERY / name).iterdir():
        text = file.read_text(encoding="utf-8")
        assert file.stat().st_size < 4_000_000, file.name
        for found in re.finditer(r"(?<![\w.+/])/(tmp|root|work|home(?!/me/)|logs|models|opt)/[\w.]", text):
            raise AssertionError(f"{file.name}: {text[max(0, found.start() - 60) : found.end() + 40]!r}")


def picture():
    """The figure of the README, as chapter 4 of the run drew it."""
    bar = next(c for c in notebooks("h200")["04_read_memory_profile"].cells if c.id == "bar")
    return base64.b64decode(next(o.data["image/png"] for o in bar.outputs if "image/png" in o.get("data", {})))


def test_the_picture_in_the_readme_is_the_gallery_s():
    assert picture() == (GALLERY / "memory-h200.png").read_bytes()
    assert "gallery/memory-h200.png" in PAGES["README.md"]


def two_cards():
    """KV tokens on two H200s: split, logged and as predicted before; copied, where both are the same."""
    folder = ROOT / "tests/data/starts/two-h200"
    starts = {s["log"]: s for s in json.loads((folder / "starts.json").read_text(encoding="utf-8"))["starts"]}
    split, copied = (f"h200x2-vllm0.27.0-qwen3.5-4b-{how}.log" for how in ("tp2", "dp2"))
    said = {log: starts[log]["predicted_before"]["kv_cache_tokens"] for log in (split, copied)}
    assert said[copied] == read_log(folder / copied).kv_cache_tokens
    return tuple(f"{n:,}" for n in (read_log(folder / split).kv_cache_tokens, said[split], said[copied]))


def claims():
    """(page, its words with {} for each figure, the figures that the runs hold)."""
    h200, cpu = RUNS["h200"], RUNS["cpu"]
    begun, day, took = f"{h200['server']['ready_seconds']:.0f}", h200["date"][:10], f"{h200['seconds']:.0f}"
    weights, pool = (str(measured("h200", "04_read_memory_profile", k)) for k in ("weights", "KV cache"))
    tokens = f"{measured('h200', '04_read_memory_profile', 'KV cache, tokens'):,}"
    at_once = f"{measured('h200', '08_benchmark', 'best throughput'):,.0f}"
    batch = f"{measured('h200', '07_offline_inference', 'batch against one by one'):.1f}"
    cpu_begun, cpu_took = f"{cpu['server']['ready_seconds']:.0f}", f"{cpu['seconds']:.0f}"
    return [
        ("README.md", "first start {} s, all nine chapters {} s on an H200", (begun, took)),
        ("README.md", "try kernels: later ones find that in `~/.cache` | {} s |", (begun,)),
        ("README.md", "alone (chapter 5) | {} ms |", (f"{measured('h200', '05_dissect_request', 'TPOT'):.2f}",)),
        ("README.md", "at once (chapter 8) | {} tokens/s |", (at_once,)),
        ("README.md", "one by one (chapter 7) | {} times as fast |", (batch,)),
        ("README.md", "The log said the same: {} GiB, {} GiB for the cache, {} tokens.", (weights, pool, tokens)),
        ("README.md", "weights {} GiB, KV pool {} GiB of an H200", (weights, pool)),
        ("README.md", "Qwen3.5-4B on an H200, vLLM 0.27.0, {} (random weights", (day,)),
        ("README.md", "One H200, {}, random weights", (day,)),
        ("README.md", "server ready after {} s, all nine chapters {} s (two cores", (cpu_begun, cpu_took)),
        (
            "README.md",
            "the 4B held {} tokens ({} predicted before the start), copied {} on each (as predicted)",
            two_cards(),
        ),
        ("gallery/README.md", "NVIDIA H200 (driver 580.159.04, {})", (day,)),
        ("gallery/README.md", "all nine chapters passed in {} s. Chapter 7 ran last", (took,)),
        (
            "gallery/README.md",
            "without a GPU ({}): all nine chapters passed in {} s with",
            (cpu["date"][:10], cpu_took),
        ),
    ]


def found_in(text, words):
    pattern = r"\s+".join(map(re.escape, words.split())).replace(r"\{\}", r"([\d.,-]*\d)")
    return re.search(pattern, text)


@pytest.mark.parametrize("page, words, figures", claims(), ids=range(len(claims())))
def test_the_numbers_in_the_readme_are_the_run_s(page, words, figures):
    found = found_in(PAGES[page], words)
    assert found, f"{page} no longer says: {words}"
    assert found.groups() == figures, f"{page}: {words.format(*figures)!r} (python tests/test_gallery.py writes it)"


def test_the_golden_check_of_the_run():
    """From card and flags alone: weights within 1 %, pool within 3 %; tokens exact given the logged pool."""
    log = read_log(GALLERY / "h200" / RUNS["h200"]["server"]["log"])
    flags = {"max_model_len": log.max_model_len, "vllm_version": log.vllm_version}
    found = budget("Qwen3.5-4B", gpu="H200", gpu_memory_utilization=log.utilization, **flags)
    assert found.weights_gib == pytest.approx(log.weights_gib, rel=0.01)
    assert found.available_kv_gib == pytest.approx(log.available_kv_gib, rel=0.03)
    law = budget("Qwen3.5-4B", available_kv_gib=log.available_kv_gib, **flags)
    low, high = law.kv_cache_tokens_range
    assert low <= log.kv_cache_tokens <= high and law.kv_cache_tokens == log.kv_cache_tokens


def write_pages():
    """Put the runs' figures into the READMEs, and the run's picture beside them; say which changed."""
    (GALLERY / "memory-h200.png").write_bytes(picture())
    for page, words, figures in claims():
        text = (ROOT / page).read_text(encoding="utf-8")
        found = found_in(text, words)
        if not found:
            print(f"{page} no longer says: {words}")
        elif found.groups() != figures:
            print(f"{page}: {' '.join(found[0].split())} -> {words.format(*figures)}")
            for n in range(len(figures), 0, -1):
                text = text[: found.start(n)] + figures[n - 1] + text[found.end(n) :]
            (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages()
