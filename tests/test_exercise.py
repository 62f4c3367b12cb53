"""The exercises: every right answer taken, every typical mistake recognised by name, tries, hints, solutions, the card."""

import ast
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import nbformat
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

import qrecipe
from qrecipe import chapter as running
from qrecipe import exercise, layers
from qrecipe.chapter import Chapter
from qrecipe.errors import BadInput, RequestFailed
from qrecipe.judge import answered
from qrecipe.log_source import recorded
from qrecipe.memory import longest_of
from qrecipe.units import KINDS, convert, quantity
from qrecipe.vision import image_tokens
from qrecipe.workshop import recorded_values

ANSWERS = json.loads((ROOT / "tests/data/answers.json").read_text())
NOTEBOOKS = {p.stem: nbformat.read(p, 4) for p in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
SHAPE = qrecipe.shape.load_shape("Qwen3.5-4B")
H200 = qrecipe.read_log(recorded())
SICK = layers.Facts(
    driver="580.105.08", driver_cuda="13.0", gpus=(layers.Gpu("NVIDIA GeForce RTX 4090 D", 23.6, (8, 9)),), torch="2.11.0+cu128",
    torch_cuda="12.8", wants_torch="2.11.0", vllm="0.23.0", vllm_cudart=13, transformers="5.17.0", cudart_folders=(("/env/lib", 12),),
)  # fmt: skip


def pool_of(log):
    return qrecipe.budget(
        "Qwen3.5-4B",
        available_kv_gib=log.available_kv_gib,
        max_model_len=log.max_model_len,
        vllm_version=log.vllm_version,
    )


def on(card, **flags):
    return lambda change: qrecipe.budget(SHAPE, gpu=card, **flags | change)


def reply(fields):
    """What a server says to the question of chapter 3: an answer of 20 tokens, cut where it is told to."""
    count = fields.get("max_tokens", 128)
    if count < 1:
        raise RequestFailed("the server refused max_tokens: it must be at least 1.")
    reason = "length" if count < 20 else "stop"
    return {
        "choices": [{"finish_reason": reason, "message": {"content": "words"}}],
        "usage": {"completion_tokens": min(count, 20)},
    }


def thinking(fields):
    """What a server says in chapter 5: sixteen tokens of thinking, or an answer where that is switched off."""
    on = fields.get("chat_template_kwargs", {}).get("enable_thinking", True)
    return {"choices": [{"message": {"content": None if on else "120"}}]}


def promise(address):
    if ":9/" in address:
        raise ConnectionError("Connection refused")
    return SimpleNamespace(id="small", max_model_len=4096 if "8001" in address else 32768)


def cards_of(n):
    return qrecipe.budget(SHAPE, gpu="RTX 4090", max_model_len=n, gpu_memory_utilization=0.9, max_num_seqs=256)


VALUES = {  # what each cell of the notebooks passes to check()
    "1.1": {}, "1.2": {"shape": SHAPE, "plan": qrecipe.budget(SHAPE, gpu="RTX 4090", max_model_len=32768)},
    "1.3": {"budget": qrecipe.budget(SHAPE, max_model_len=4096)}, "1.4": {}, "1.5": {"effect": on("RTX 4060", max_model_len=8192)},
    "2.1": {}, "2.2": {}, "2.3": {"effect": lambda c: layers.first_broken(layers.judge_layers(replace(SICK, **c), "gpu"))}, "2.4": {},
    "3.1": {"budget": cards_of(65_536), "shorter": cards_of(32_768)}, "3.2": {"spent": {"a": 80.0, "b": 6.0, "c": 1.0, "d": 3.0}},
    "3.3": {"effect": reply}, "3.4": {"effect": promise}, "4.1": {"log": H200}, "4.2": {"law": pool_of(H200)}, "4.3": {},
    "4.4": {"pool": pool_of(qrecipe.read_log(recorded("262144"))), "longest": longest_of(pool_of(qrecipe.read_log(recorded("262144"))))},
    "4.5": {"effect": on("H200", max_model_len=32768, gpu_memory_utilization=0.07)},
    "5.1": {}, "5.2": {"prompt": 26, "question": 14}, "5.3": {"effect": thinking},
    "5.4": {"d": SimpleNamespace(e2e=1.09, ttft=0.1, completion_tokens=100, chunks=[None] * 80)}, "5.5": {"shape": SHAPE},
    "6.1": {"count": image_tokens(640, 480)}, "6.2": {"effect": lambda size: image_tokens(**size).prompt_tokens}, "6.3": {},
    "6.4": {"tower": SHAPE.count() - SHAPE.count(vision=False)}, "7.1": {"ratio": 4.0, "seconds": {"one by one": 4.0, "one batch": 1.0}}, "7.2": {},
    "8.1": {}, "8.2": {"rate": 4.0, "seconds": 1.5},
    "9.1": {name: qrecipe.budget("Qwen3.5-27B", gpu="H200", max_model_len=32768, tensor_parallel_size=n) for n, name in [(1, "one"), (2, "two")]}, "9.2": {},
}  # fmt: skip


def timing(e2e, ttft, tokens, chunks):
    return {"d": SimpleNamespace(e2e=e2e, ttft=ttft, completion_tokens=tokens, chunks=[None] * chunks)}


MEASURED = [  # what other devices and other lengths give to the exercises on measurements
    ("5.4", timing(0.8951, 0.039, 80, 81)),  # gallery/cpu
    ("5.4", timing(2.8, 0.013, 768, 769)),  # 3.63 ms a token, an H200
    ("5.4", timing(2.7897, 0.0635, 768, 770)),  # 3.55 ms a token, gallery/h200
    ("5.4", timing(2.8, 0.013, 768, 200)),
    ("5.4", timing(0.05, 0.04, 2, 3)),
    ("8.2", {"rate": 8.382, "seconds": 0.896}),  # gallery/cpu
    ("8.2", {"rate": 29.8, "seconds": 1.008}),
    ("8.2", {"rate": 4.013, "seconds": 0.995}),
]
NUMBERS = [n for n, e in exercise.book().items() if e["kind"] == "number"]


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Open a chapter whose answers are kept in a folder of the test's own."""

    def open_chapter(**answers):
        monkeypatch.setenv("QRECIPE_OUT", str(tmp_path))
        monkeypatch.setattr(running, "_current", Chapter("01_size_gpu", "cpu", "", {"answers": answers}, "", {}))
        return tmp_path / "exercises/01_size_gpu.json"

    open_chapter()
    return open_chapter


def test_the_toml_the_notebooks_and_the_answers_have_the_same_exercises_in_order():
    for number, nb in ((stem[:2], nb) for stem, nb in NOTEBOOKS.items()):
        called = [
            re.findall(r'exercise\.check\("([\d.]+)"', c.source)
            for c in nb.cells
            if "exercise" in c.metadata.get("tags", [])
        ]
        asked = re.findall(
            r"^### Exercise ([\d.]+): (.*)$", "\n".join(c.source for c in nb.cells if c.cell_type == "markdown"), re.M
        )
        mine = [(n, e) for n, e in exercise.book().items() if int(n.split(".")[0]) == int(number)]
        assert [n for names in called for n in names] == [n for n, _ in asked] == [n for n, _ in mine]
        assert [t.replace("`", "") for _, t in asked] == [e["title"] for _, e in mine]
    assert list(ANSWERS) == list(VALUES) == list(exercise.book())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_an_exercise_takes_no_name_that_its_chapter_uses(name):
    def assigned(cells):
        text = "\n".join(c.source for c in cells)
        return set(re.findall(r"^def (\w+)|^(\w+) = ", text, re.M))

    code = [c for c in NOTEBOOKS[name].cells if c.cell_type == "code"]
    mine = [c for c in code if "exercise" in c.metadata.get("tags", [])]
    assert assigned(mine) & assigned(c for c in code if c not in mine) == set()


@pytest.mark.parametrize("number", ANSWERS)
def test_right_answers_are_taken_in_any_unit(number, begin):
    for answer in ANSWERS[number]["right"]:
        told = exercise.check(number, answer, **VALUES[number])
        assert told.state == "right", (answer, told)


@pytest.mark.parametrize("number", ANSWERS)
def test_every_typical_mistake_is_recognised(number, begin):
    for answer, said in ANSWERS[number]["wrong"]:
        told = exercise.check(number, answer, **VALUES[number])
        assert told.state == "wrong" and said in told.lines[1], (answer, told)


@pytest.mark.parametrize("number", [n for n in ANSWERS if "refused" in ANSWERS[n]])
def test_what_is_refused_costs_no_try_and_says_what_is_expected(number, begin):
    for answer, said in ANSWERS[number]["refused"]:
        told = exercise.check(number, answer, **VALUES[number])
        assert told.state == "open" and said in told.lines[0], (answer, told)
    assert running._current.exercises[number]["tries"] == []


NONSENSE = [3, "x", [], [1], {"nonsense": 1}, {"width": 0}, {"width": "a"}, {"width": 1e9}, {"width": {"height": [None]}},
            {"max_num_seqs": "x"}, {"gpu_memory_utilization": None}, {"torch": 3, "torch_cuda": []}, {"width": 10**9, "height": 1},
            {1: 2}, {"": ""}, object(), float("nan"), "http://", "9e9/2**30"]  # fmt: skip
RAW = re.compile(
    r"object has no|unexpected keyword|not supported|division|__init__|Error\b|Traceback|argument|\.\.\.$|…$"
)


@pytest.mark.parametrize("number", [n for n, e in exercise.book().items() if e["kind"] == "change"])
def test_nonsense_is_answered_by_a_sentence_and_costs_no_try(number, begin):
    kind = {"dict": dict, "text": str}[exercise.book()[number]["answer"]]
    assert exercise.check(number, None, **VALUES[number]).state == "open"
    for answer in NONSENSE:
        told = exercise.check(number, answer, **VALUES[number])
        assert told.state == "open" and "expected" in repr(told) or "known are" in repr(told), (answer, told)
        assert not RAW.search(repr(told)) or not isinstance(answer, kind), (answer, told)
    assert running._current.exercises[number]["tries"] == []


EXAMPLES = [(m[1], ast.literal_eval(m[0])) for nb in NOTEBOOKS.values() for c in nb.cells
            for m in re.findall(r"""my_answer = \S+ +# for example (.+)[^\0]*?exercise\.check\("([\d.]+)\"""", c.source)]  # fmt: skip


@pytest.mark.parametrize("number, example", EXAMPLES)
def test_the_example_in_a_cell_can_be_read_and_is_not_right(number, example, begin):
    told = exercise.check(number, example, **VALUES[number])
    assert told.state == "wrong", told
    assert exercise.book()[number].get("example", str(example)) in (json.dumps(example), str(example))
    for values in (v for n, v in MEASURED if n == number):
        assert exercise.check(number, example, **values).state == "wrong"


@pytest.mark.parametrize("number", NUMBERS)
def test_the_example_in_a_refusal_is_not_right(number, begin):
    told = exercise.check(number, "1e999", **VALUES[number])
    assert told.state == "open"
    assert exercise.check(number, re.search(r"such as '(.+?)'", told.lines[0])[1], **VALUES[number]).state == "wrong"


def test_every_exercise_but_letters_has_an_example_in_its_cell():
    assert {n for n, e in exercise.book().items() if e["kind"] != "choose"} - {n for n, _ in EXAMPLES} <= {"1.2", "1.3"}


@pytest.mark.parametrize(
    "number, values", [(n, VALUES[n]) for n, e in exercise.book().items() if e["kind"] == "number"]
)
def test_the_right_value_rounded_to_two_digits_or_more_is_right_in_every_unit(number, values, begin):
    spec = exercise.book()[number]
    right = exercise.evaluate(spec["right"], {"ceil": math.ceil} | values)
    kind = quantity(1, spec["unit"]).kind
    things = {"": 1, spec["unit"]: 1}  # tokens are no requests
    for unit, size in (things if kind == "count" else KINDS[kind]).items():
        in_it = quantity(right, spec["unit"]).base / size
        for digits in range(2, 7) if not isinstance(right, int) else [12]:
            if 1e-3 < in_it < 1e7:
                told = exercise.check(number, f"{float(f'{in_it:.{digits}g}'):.12f} {unit}", **values)
                as_a_mistake = digits == 2 and not told.lines[1].endswith(("large.", "small."))  # rounds to the same
                assert told.state == "right" or as_a_mistake, (unit, digits, told)


def test_no_mistake_is_claimed_that_the_reader_s_figures_do_not_tell_from_right(begin):
    values = {"rate": 7.49, "seconds": 0.9933}  # 7.44 inside, 7.49 come each second
    assert exercise.check("8.2", "7.5", **values).state == exercise.check("8.2", "7.49", **values).state == "right"


def test_nothing_is_counted_after_the_right_answer(begin):
    tried = [exercise.check("1.1", a) for a in ("9 GiB", "8.38 GiB", "7 GiB", "6 GiB", "8.4 GiB")]
    assert [t.state for t in tried] == ["wrong", "right", "wrong", "wrong", "right"]
    assert "before was right" in tried[2].lines[0] and len(tried[3].lines) == 2
    assert running._current.exercises["1.1"] == {"state": "right", "tries": ["9 GiB", "8.38 GiB"]}


@pytest.mark.parametrize("number", [n for n, e in exercise.book().items() if "recorded" in e])
def test_what_the_answer_key_takes_is_what_the_notebook_passes(number):
    spec, values = exercise.book()[number], VALUES[number]
    key = recorded_values(spec)
    assert set(spec["recorded"]) == set(values)
    env = {"ceil": math.ceil}
    assert exercise.say(spec["solution"], env | key) == exercise.say(
        spec["solution"], env | values | {"right": key["right"]}
    )


@pytest.mark.parametrize("number", ANSWERS)
def test_no_mistake_is_without_a_test_and_none_looks_right(number, begin):
    spec, heard = exercise.book()[number], ""
    for answer, _ in ANSWERS[number]["wrong"]:
        heard += exercise.check(number, answer, **VALUES[number]).lines[1]
    texts = [m[1] for m in spec.get("mistakes", []) + spec.get("slips", []) + spec.get("fails", [])]
    texts += [t for letter, t in spec.get("options", {}).items() if letter not in ANSWERS[number]["right"]]
    for text in texts:
        fixed = max(re.split(r"\{[^}]*\}+", text), key=len).strip()
        assert fixed in heard, (number, text)


@pytest.mark.parametrize("number, values", [(n, VALUES[n]) for n in NUMBERS] + MEASURED)
def test_no_typical_mistake_lies_within_the_tolerance(number, values, begin):
    """Every declared mistake, and the slips between units, told to five digits: wrong, unless no measurement tells it from right."""
    spec, env = exercise.book()[number], {"ceil": math.ceil} | values
    env["right"] = right = exercise.evaluate(spec["right"], env)
    kind = quantity(1, spec["unit"]).kind
    mistakes = [exercise.evaluate(expression, env) for expression, _ in spec.get("mistakes", [])]
    mistakes += [right * factor for key in (kind, spec["unit"]) for factor, _ in exercise.SLIPS.get(key, [])]
    for value in mistakes:
        told = exercise.check(number, f"{value:.5g} {spec['unit']}", **values)
        assert told.state == "wrong" or abs(value - right) <= spec["tolerance"] * right, (value, right, told)
    assert exercise.check(number, f"{right:.5g}", **values).state == "right"
    assert exercise.check(number, f"{right:.9g}", **values).state == "right"


def test_a_guess_may_be_what_is_otherwise_a_mistake(begin):
    assert exercise.check("7.1", "8", ratio=7.0, seconds={"one by one": 7.0, "one batch": 1.0}).state == "right"


def test_a_rounded_answer_is_right_though_a_mistake_rounds_to_the_same(begin):
    assert exercise.check("5.4", "3.63 ms", **MEASURED[1][1]).state == "right"
    assert "gaps" in exercise.check("5.4", "3.629 ms", **MEASURED[1][1]).lines[1]


@pytest.mark.parametrize("answer, said", [("9 GB", "9 GB are 8.382 GiB."), ("8.38 GiB", "8.38 GiB.")])
def test_another_unit_than_the_asked_one_is_converted_aloud(answer, said, begin):
    assert exercise.check("1.1", answer).lines[1] == said


@pytest.mark.parametrize(
    "answer, said", [("8583 MB", "in MiB (2²⁰"), ("9000 MiB", "in MB (10⁶"), ("8.38e9 B", "6.9 % too small")]
)
def test_twins_are_told_apart_in_the_unit_that_was_written(answer, said, begin):
    told = exercise.check("1.1", answer)
    assert told.state == "wrong" and said in told.lines[1]


@pytest.mark.parametrize(
    "number, answer, said",
    [("1.2", "8,455 GiB", "A comma before three digits"), ("1.2", "8455 GiB", "1,000 times as large as it should be."),
     ("1.3", "0.177", "in GiB, read here as MiB"), ("1.1", "8583", "in MiB, read here as GiB"), ("6.4", "667", "in MB, read here as GiB"), ("1.3", "0.19", "in GB, read here as MiB"), ("3.1", "9", "32,768"), ("4.2", "34", "32,768"), ("2.4", "1.5 min", "a byte has 8 bits")],
)  # fmt: skip
def test_a_slip_of_the_pen_is_told_however_it_was_rounded(number, answer, said, begin):
    assert said in exercise.check(number, answer, **VALUES[number]).lines[1]


@pytest.mark.parametrize("number", ANSWERS)
def test_a_hint_after_the_second_try_and_the_solution_after_the_third(number, begin):
    wrong = [a for a, _ in ANSWERS[number]["wrong"]][:3]
    assert len(wrong) == 3 or exercise.book()[number]["kind"] != "number"
    told = [exercise.check(number, a, **VALUES[number]) for a in wrong]
    assert len(told[0].lines) == 2
    assert told[1].lines[-1].startswith("Hint: ") and len(told[1].lines) == 3
    if len(told) > 2:
        assert [line.split(": ")[0] for line in told[2].lines[2:]] == ["Hint", "Solution"]


def test_the_same_answer_again_is_no_new_try(begin):
    assert [exercise.check("1.1", "9 GiB").lines[0] for _ in range(3)] == ["Exercise 1.1, try 1: not yet."] * 3


@pytest.mark.parametrize("answer", ["nine", "9 foo", "9 s", True, [], "GiB"])
def test_what_cannot_be_read_is_no_try_and_says_what_is_expected(answer, begin):
    told = exercise.check("1.1", answer)
    assert told.state == "open" and "expected" in told.lines[0] or answer == []
    assert running._current.exercises["1.1"]["tries"] == []


@pytest.mark.parametrize(
    "answer", [float("inf"), float("nan"), "-3 GiB", 0, "1/2 GiB", "8.4 GiB GiB", "½ GiB", 10**400, b"8", {"a": 1}]
)
def test_no_answer_raises(answer, begin):
    assert exercise.check("1.1", answer).state in ("open", "wrong")


def test_nothing_typed_passes_quietly_and_leaves_no_file(begin):
    file = begin()
    told = [exercise.check(n, empty, **VALUES[n]) for n, empty in zip(ANSWERS, [None, "", {}] * 11, strict=False)]
    assert {t.state for t in told} == {"open"} and not file.exists()
    assert repr(exercise.card()) == f"○ Exercises: none of {len(ANSWERS)} answered; run this cell again after you have."


def test_answers_as_a_parameter_one_or_several(begin):
    file = begin(**{"1.1": ["9 GiB", "16.8 GiB", "8.38 GiB"], "1.4": "b"})
    assert exercise.check("1.1", "").state == exercise.check("1.4", "").state == "right"
    assert json.loads(file.read_text()) == {
        "1.1": {"state": "right", "tries": ["9 GiB", "16.8 GiB", "8.38 GiB"]},
        "1.4": {"state": "right", "tries": ["b"]},
    }
    assert exercise.check("1.1", "1 GiB").state == "wrong"  # what is typed goes first
    assert json.loads(file.read_text())["1.1"]["state"] == "right"  # and what was right stays so


def test_the_card_counts_the_chapter_and_the_book(begin, monkeypatch):
    begin()
    exercise.check("1.1", "8.38 GiB")
    exercise.check("1.4", "a")
    text = repr(exercise.card())
    assert (
        "1.1 weights of another model  ✓ right, 1 try" in text and "✗ not yet, 1 try" in text and "■□□□□ 1 of 5" in text
    )
    monkeypatch.setattr(running, "_current", Chapter("02_install_layers", "cpu", "", {}, "", {}))
    exercise.check("2.2", "c")
    assert f"2 of {len(exercise.book())} exercises" in repr(exercise.card())
    assert exercise.summary()["right"] == 1


def test_a_run_says_how_answers_were_judged(begin):
    begin(**{"1.1": "9 GiB", "1.2": "8.455 GiB", "1.3": "much"})
    for number in ("1.1", "1.2", "1.3", "1.4"):
        exercise.check(number, "", **VALUES[number])
    assert answered(exercise.summary()) == "1 right, 1 wrong (1.1), 1 not judged (1.3)"
    assert answered({"of": 4, "right": 0, "answered": {}}) == answered(None) == ""


def test_a_verdict_is_escaped(begin):
    page = exercise.check("1.4", "<script>")._repr_html_() + exercise.check("1.1", "<b>")._repr_html_()
    assert "<script" not in page and "<b>&" not in page


@pytest.mark.parametrize("answers", [[], "b", {"9.9": 1}, {"1.1": "8.38 GiB", "x": 2}])
def test_answers_to_no_exercise_are_refused_before_anything_runs(answers):
    with pytest.raises(BadInput, match="answers"):
        running.check_values({"answers": answers})


@given(st.floats(0.01, 1e5), st.sampled_from(["GiB", "GB", "MiB", "ms", "s", "tokens", "%", "GB/s"]))
def test_a_number_written_in_a_unit_is_read_back(value, unit):
    assert convert(quantity(f"{value:.6f}{unit}", unit), unit) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    "written, asked, base",
    [("1,024 tokens", "tokens", 1024), ("8,6 GiB", "GiB", 8.6 * 2**30), ("9.2gb", "GiB", 9.2e9), ("8 Gb", "GiB", 1e9), ("~3.5x", "x", 3.5),
     ("4.5 billion", "parameters", 4.5e9), ("2.9 million tokens", "tokens", 2.9e6), ("3M", "tokens", 3e6), ("3 M", "GiB", None), (7, "ms", 0.007), ("about 2 min.", "s", 120), ("µ", "s", None), ("0:12", "min", None), ("36 tokens", "requests", None), ("2 times", "x", 2), ("1 patch", "patches", 1), ("3 GiB", "s", None)],
)  # fmt: skip
def test_numbers_as_people_write_them(written, asked, base):
    if base is None:
        with pytest.raises(BadInput, match="expected"):
            quantity(written, asked)
    else:
        assert quantity(written, asked).base == pytest.approx(base)
