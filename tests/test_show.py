"""Tables and figures: escaped, complete, shown once, readable without a notebook too."""

import json
import subprocess
import sys

import pytest

from qrecipe import show
from qrecipe.dissection import Chunk, Dissection
from qrecipe.log_source import recorded
from qrecipe.startup_log import read_log
from qrecipe.vision import image_tokens

PARTS = [("weights", 8.61, ""), ("non-torch", 0.62, ""), ("peak activation", 3.63, ""), ("CUDA graphs", 0.66, ""), ("KV cache pool", 112.46, ""), ("left free", 13.82, "")]  # fmt: skip


def shown(figure):
    data, metadata = figure._repr_mimebundle_()
    assert data["image/png"].startswith("iVBOR")
    assert metadata["image/png"]["alt"] and metadata["image/png"]["alt"] in data["text/plain"]
    return metadata["image/png"]["alt"]


def test_a_table_escapes_html_and_formulas():
    page = show.table([("<script>alert(1)</script>", "$x$", None)], ["<b>", "b", "c"], caption="<i>")._repr_html_()
    assert "<script" not in page and "<b>" not in page and "<i>" not in page and "$x$" not in page
    assert "&lt;script&gt;" in page and "–" in page


def test_a_table_takes_tuples_dicts_named_tuples_and_nothing():
    row = Dissection("m", "e", [], [], [], [], [], None, 3, 2, {}).table()
    assert show.table(row).columns == ["name", "value", "unit", "formula", "clock"]
    assert show.table([{"a": 1}, {"b": 2}]).rows == [[1, None], [None, 2]]
    assert show.table({"a": 1}).rows == [["a", 1]]
    assert repr(show.table([])) == "nothing to show" and "nothing" in show.table([])._repr_html_()
    assert repr(show.table([("x", 12345), ("yy", None)], ["n", "v"])).splitlines() == [
        "n        v",
        "x   12,345",
        "yy       –",
    ]


@pytest.mark.parametrize("value, text", [(None, "–"), (float("nan"), "–"), (0.0, "0"), (True, "True"), (8000, "8000"), (32768, "32,768"), (112.46, "112.46"), (0.01234, "0.0123"), ("a", "a")])  # fmt: skip
def test_numbers_have_the_digits_a_reader_needs(value, text):
    assert show.number(value) == text


def test_the_memory_bar_says_its_parts():
    alt = shown(show.memory_bar(PARTS, 139.8, "One card", limit_gib=125.82))
    assert "KV cache pool 112.46 GiB" in alt
    shown(
        show.memory_bar(
            {"predicted": PARTS, "logged": [("weights", None, ""), ("KV cache pool", -1.0, "")]}, 139.8, "Two"
        )
    )
    shown(show.memory_bar([], None, "Nothing known"))


def test_stages_with_and_without_times():
    log, excerpt = read_log(recorded()), read_log(recorded("4090d"))
    assert "compile 38 s" in shown(show.stages_bar(log.stages))
    shown(show.stages_bar({"H200": log.stages, "4090 D": excerpt.stages}))
    shown(show.stages_bar([]))


def request(n=5, complete=True):
    chunks = [Chunk(0.01, "role", "", 0)] + [Chunk(0.1 + i / 100, "content", "$x$", 1) for i in range(n)]
    return Dissection("m", "e", chunks, ["x"], [None], [], ["stop"], None, 3, n, complete=complete)


def test_a_live_front_end_gets_the_alternative_text_in_html(monkeypatch):
    from PIL import Image

    from qrecipe import chapter

    monkeypatch.setattr(chapter, "attended", lambda: True)
    figure = show.line_plot([1, 2], {"a": [1, 2]}, title='<"t">', xlabel="x", ylabel="y")
    data, metadata = figure._repr_mimebundle_()
    assert "image/png" not in data and 'alt="&lt;&quot;t&quot;&gt;' in data["text/html"] and metadata == {}
    assert (
        'alt="red" width="3"' in show.Photo(Image.new("RGB", (3, 3), "red"), "red")._repr_mimebundle_()[0]["text/html"]
    )


def test_a_measured_figure_names_its_device(monkeypatch):
    from qrecipe import chapter

    monkeypatch.setattr(chapter, "_current", chapter.Chapter("x", "cpu", "", {}, "A CPU, 2 cores", {"vllm": "0.27.0"}))
    assert "A CPU, 2 cores · vLLM 0.27.0 · 20" in shown(show.timeline(request()))
    assert "A CPU" not in shown(show.line_plot([1, 2], {"a": [1, 2]}, title="a law", xlabel="x", ylabel="y"))


def test_a_timeline_of_one_two_or_a_broken_request():
    assert "TTFT 100 ms" in shown(show.timeline(request()))
    shown(show.timeline([request(), request(500)], ["off", "on"]))
    shown(show.timeline(request(0, complete=False)))


def test_the_patch_grid_counts():
    from PIL import Image

    for size in [(500, 300), (40, 4000), (4000, 3000)]:
        count = image_tokens(*size)
        assert f"{count.tokens} tokens" in shown(show.patch_grid(Image.new("RGB", size), count))


def test_lines_with_gaps_and_limits():
    shown(
        show.line_plot(
            [1, 2, 4],
            {"a": [1, None, 3], "some limit": [1, 1, 1]},
            title="t",
            xlabel="x",
            ylabel="y",
            log=True,
            limits={"top": 2},
        )
    )


def test_matplotlib_is_not_loaded_before_a_figure():
    code = "import sys, json, qrecipe.show as s; s.table([(1, 2)]); print(json.dumps([m for m in ('matplotlib', 'pandas', 'torch') if m in sys.modules]))"
    assert (
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        == []
    )


def test_the_live_bar_escapes_and_stays_fast():
    import time
    from xml.dom import minidom

    began = time.perf_counter()
    for _ in range(20):
        page = show.memory_svg(PARTS, 139.8, 'a <b> & "c"', limit_gib=125.82, notes=["x < y " * 60])
    assert (time.perf_counter() - began) / 20 < 0.1
    assert "<b>" not in page and minidom.parseString(page)
    assert "missing  1.00 GiB" in show.memory_svg([("left free", -1.0)], 8.0, "t")


def test_a_dashboard_draws_alone_where_nobody_can_turn_knobs(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    out = show.dashboard(lambda a, b: f"<p>{a} {b}</p>", {"a": [1, 2], "b": ["x"]}, a=2)
    assert out._repr_html_() == "<p>2 x</p>"


def test_a_dashboard_redraws_when_a_knob_turns(monkeypatch):
    pytest.importorskip("ipywidgets")
    from qrecipe import show_live
    from qrecipe.errors import BadInput

    def draw(a, b):
        if a == 3:
            raise BadInput("no <3>")
        return f"<p>{a} {b}</p>"

    monkeypatch.setattr(show_live, "is_live", lambda: True)
    box = show.dashboard(draw, {"a": [1, 2, 3], "b": ["x", "y"]}, a=2)
    slider, menu, picture = box.children
    assert picture.value == "<p>2 x</p>"
    menu.value = "y"
    slider.value = 1
    assert picture.value == "<p>1 y</p>"
    slider.value = 3
    assert picture.value == "<p>no &lt;3&gt;</p>"


@pytest.mark.parametrize(
    "text, shown",
    [
        (None, ""),
        (" a\nb ", "a⏎b"),
        ("\n" * 9, "⏎⏎⏎⏎…"),
        ("a" + "\n" * 128, "a⏎×1…"),
        ("\n" * 128, "⏎×128"),
        ("abcde", "abcde"),
        ("abcdef", "abcd…"),
    ],
)
def test_any_answer_fits_one_line(text, shown):
    assert show.one_line(text, 5) == shown


@pytest.mark.parametrize("token", ["$$", "$\\frac$", "\x00", "<b>", "%d"])
def test_a_token_that_a_model_writes_is_drawn_as_it_is_and_is_no_formula(token):
    from qrecipe.show_request import distributions

    figure = distributions(["a", token], {"temperature": ([0.5, 0.5], [0.9, 0.1])}, title="two tokens")
    assert figure._repr_mimebundle_()[0]["image/png"]


@pytest.mark.parametrize(
    "column, side",
    [
        ([1, None, 2.5], "right"),
        (["22.05", "23.50 *", "–", "96%"], "right"),
        (["74,448", 262144, None, 99792, "does not start"], "right"),
        ([1, 4, 0.9, "127.0.0.1", "qwen3.5-4b", ""], "left"),
        (["", "", "words"], "left"),
        ([1, "a", "b"], "left"),
        ([True, False], "left"),
        ([None], "left"),
    ],
)
def test_a_column_of_numbers_stands_to_the_right(column, side):
    assert show.table([(value,) for value in column], ["x"]).sides == [side]
