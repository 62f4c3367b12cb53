"""What a run leaves for people and machines: a page that runs nothing, JUnit XML, a summary that no log can break out of."""

from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from qrecipe.report import LONGEST, inline, write_page, write_report

EVIL = "<script>alert(1)</script> ```` \x1b[31m \x00 ]]> & \ud800 <img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path):
    """A run whose every text is hostile, and its executed notebook."""
    cell = new_code_cell("print('x')", execution_count=1)
    cell.outputs = [
        new_output("stream", text=EVIL.replace("\ud800", "")),
        new_output("stream", text="y" * (LONGEST + 1234567)),
    ]
    nbformat.write(new_notebook(cells=[cell]), tmp_path / "03_x.ipynb")
    chapters = [
        {"name": "03_x", "status": "failed", "seconds": 1.0, "reason": EVIL, "cell": EVIL, "line": EVIL, "mend": EVIL, "log_tail": EVIL, "measured": {}},
        {"name": "04_y", "status": "passed", "seconds": 2.0, "reason": "", "cell": "", "line": "", "mend": "", "log_tail": "", "measured": {EVIL: {"value": EVIL, "unit": EVIL}}},
        {"name": "05_z", "status": "skipped", "seconds": 0.0, "reason": "no GPU", "cell": "", "line": "", "mend": "", "log_tail": "", "measured": {}},
    ]  # fmt: skip
    return {
        "passed": False, "date": "2026-11-30T02:00:00+00:00", "seconds": 3.0, "engine": "cpu", "reason": EVIL, "device": EVIL, "versions": {"vllm": EVIL},
        "lock": "cpu.txt", "lock_sha256": None, "lock_departures": [EVIL], "note": EVIL, "weights": "real", "model": {"name": EVIL},
        "server": {"ready_seconds": 1.0, "log": EVIL}, "chapters": chapters,
    }  # fmt: skip


def test_the_page_shows_hostile_text_and_runs_none_of_it(tmp_path, run):
    page = write_report(tmp_path, run).read_bytes().decode("utf-8", "replace")
    assert "default-src 'none'" in page
    assert "<script" not in page and "<img src=x" not in page and "&lt;script&gt;alert(1)" in page
    assert "and 1,234,567 more characters in 03_x.ipynb" in page and len(page) < 300_000


def test_junit_xml_can_be_read_whatever_the_log_held(tmp_path, run):
    suite = ElementTree.parse(write_page(tmp_path, "junit.xml", run=run)).getroot()
    assert {k: suite.get(k) for k in ("tests", "failures", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
    }
    assert [c.get("name") for c in suite] == ["03_x", "04_y", "05_z"]
    assert "<script>alert(1)</script>" in suite[0][0].text and suite[2][0].get("message") == "no GPU"


def test_a_notebook_s_name_is_hostile_as_well(tmp_path, run):
    run["chapters"][2]["name"] = EVIL
    assert len(ElementTree.parse(write_page(tmp_path, "junit.xml", run=run)).getroot()) == 3
    text = write_page(tmp_path, "summary.md", run=run).read_bytes().decode("utf-8", "replace")
    assert "<script" not in text.split("`````text\n")[0]


def test_a_log_cannot_break_out_of_the_summary(tmp_path, run):
    text = write_page(tmp_path, "summary.md", run=run).read_bytes().decode("utf-8", "replace")
    fenced = text.split("`````text\n")
    assert len(fenced) == 4 and all("`````" in part for part in fenced[1:])
    assert "| 04_y | passed | 2 |" in text and "exercises:" not in text
    outside = "".join(part.partition("`````")[2] for part in fenced[1:]) + fenced[0]
    assert not set("<>`&[]!*@\x1b\x00") & set(outside) and outside.count("#") == 5  # its own two headings


def test_a_line_of_the_summary_keeps_what_names_and_versions_are_made_of():
    for said in (
        "01_size_gpu",
        "Intel(R) Xeon(R) Processor, 2 cores",
        "0.27.0+cpu",
        "1 right, 1 wrong (2.1)",
        "NVIDIA H200, 140.4 GiB",
    ):
        assert inline(said) == said
    assert inline("a\n# b @c #1 *d* [e](f) | _g_ <h>") == "a?? b ?c ?1 ?d? ?e?(f) ? ?g? ?h?"


def test_all_that_a_run_leaves_says_how_answers_were_judged(tmp_path, run):
    assert "<th>exercises</th>" not in write_report(tmp_path, run).read_bytes().decode("utf-8", "replace")
    for chapter, told in zip(run["chapters"], ("1 right, 1 wrong (2.1)", "", "2 right"), strict=True):
        chapter["exercises"] = told
    text = write_page(tmp_path, "summary.md", run=run).read_bytes().decode("utf-8", "replace")
    assert "\n\n03_x, exercises: 1 right, 1 wrong (2.1)\n05_z, exercises: 2 right\n\n" in text
    page = write_report(tmp_path, run).read_bytes().decode("utf-8", "replace")
    assert "<th>exercises</th>" in page and "<td>1 right, 1 wrong (2.1)</td>" in page
    suite = ElementTree.parse(write_page(tmp_path, "junit.xml", run=run)).getroot()
    assert [case.findtext("system-out") for case in suite] == [
        "exercises: 1 right, 1 wrong (2.1)",
        None,
        "exercises: 2 right",
    ]


def test_a_link_to_a_page_of_the_book_is_plain_words_in_a_report(tmp_path):
    from qrecipe.report import chapter_html

    words = "see the [glossary](glossary.md) and [vLLM](https://docs.vllm.ai)"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(words)]), tmp_path / "a.ipynb")
    page = chapter_html(tmp_path / "a.ipynb")
    assert "see the glossary and <a" in page and "https://docs.vllm.ai" in page
