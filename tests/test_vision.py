"""vision.py: the arithmetic against transformers' own processor, and files no server should see."""

import base64
import io
import random
import struct
import zlib

import pytest
from PIL import Image

from qrecipe.errors import BadInput
from qrecipe.vision import check_image, data_url, image_tokens, picture_message, processor_limits

REAL = {"min_pixels": 65_536, "max_pixels": 16_777_216}  # Qwen3.5's preprocessor_config.json
TEACHING = {"min_pixels": 65_536, "max_pixels": 1_048_576}


def png(width=64, height=64, mode="RGB", **save):
    buffer = io.BytesIO()
    Image.new(mode, (width, height), 0).save(buffer, format="PNG", **save)
    return buffer.getvalue()


def sizes(count):
    rng = random.Random(5)
    for _ in range(count):
        area = 2 ** rng.uniform(4, 23)
        aspect = 2 ** rng.uniform(-6, 6)
        yield max(1, round((area * aspect) ** 0.5)), max(1, round((area / aspect) ** 0.5))


@pytest.mark.parametrize("limits", [REAL, TEACHING], ids=["real", "teaching"])
def test_tokens_are_those_of_the_processor_on_200_sizes(limits):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, size={"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    )
    for width, height in sizes(200):
        ours = image_tokens(width, height, **limits)
        patches = processor.get_number_of_image_patches(height, width, {})
        assert ours.patches == patches, (width, height)
        assert ours.tokens == patches // 4 and ours.prompt_tokens == ours.tokens + 2
        assert (ours.grid_w * 16, ours.grid_h * 16) == (ours.resized_w, ours.resized_h)


def test_tokens_are_those_of_pictures_really_processed():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, size={"shortest_edge": 65_536, "longest_edge": 1_048_576}
    )
    for width, height in [(1, 1), (15, 2000), (48, 48), (333, 517), (640, 480), (1920, 1080), (80, 80), (256, 256)]:
        grid = processor(Image.new("RGB", (width, height)), return_tensors="pt")["image_grid_thw"][0].tolist()
        ours = image_tokens(width, height, **TEACHING)
        assert [1, ours.grid_h, ours.grid_w] == grid, (width, height)


def test_known_sizes():
    assert image_tokens(256, 256).tokens == 64
    assert image_tokens(1024, 1024).tokens == 1024
    assert image_tokens(1, 1).tokens == 64  # scaled up to the least number of pixels
    assert image_tokens(8000, 8000).tokens == 16_384  # the most a picture can take


@pytest.mark.parametrize("bad", [(0, 5), (5, -1), (True, 5), (2.5, 5), (201, 1), (1, 201)], ids=str)
def test_impossible_sizes_are_refused(bad):
    with pytest.raises(BadInput):
        image_tokens(*bad)


def test_limits_that_contradict_are_refused():
    with pytest.raises(BadInput, match="min_pixels"):
        image_tokens(10, 10, min_pixels=100, max_pixels=50)


def test_limits_are_read_from_a_model_folder(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        '{"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 1048576}}'
    )
    assert processor_limits(tmp_path) == {"patch": 16, "merge": 2, **TEACHING}
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(BadInput, match="cannot be read for patch_size"):
        processor_limits(tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        processor_limits(tmp_path / "none")


def test_good_pictures_become_rgb():
    for mode in ("RGB", "L", "RGBA", "P", "1", "LA"):
        picture = check_image(png(mode=mode))
        assert picture.mode == "RGB" and picture.size == (64, 64)
    assert check_image(png(mode="RGBA")).getpixel((0, 0)) == (255, 255, 255)  # transparent: white ground
    assert check_image(Image.new("RGB", (8, 8), "red")).getpixel((0, 0)) == (255, 0, 0)


def bomb():
    """A PNG of a few hundred bytes that announces 60,000 x 60,000 pixels."""

    def part(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = part(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + part(b"IDAT", zlib.compress(b"\0" * 1000)) + part(b"IEND", b"")


def animated(kind):
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue", "green")]
    frames[0].save(buffer, format=kind, save_all=True, append_images=frames[1:], duration=100)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"not a picture", "not a picture of a known kind"),
        (b"%PDF-1.7", "not a picture of a known kind"),
        (png(300, 300)[:-40], "cut off or broken"),
        (png()[:20], "broken"),
        (bomb(), "decompression bomb"),
        (animated("GIF"), "3 frames"),
        (animated("PNG"), "3 frames"),
        (animated("WEBP"), "3 frames"),
        (png(402, 2), "more than 200 times"),
        (12, "must be a path"),
        ("http://example.com/a.png", "not a URL"),
    ],
    ids=["empty", "text", "pdf", "cut off", "header only", "bomb", "gif", "apng", "webp", "thin", "number", "url"],
)
def test_pictures_that_are_refused(data, words):
    with pytest.raises(BadInput) as caught:
        check_image(data)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_picture_made_by_the_caller_has_the_same_limit(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert check_image(Image.new("RGB", (40, 25))).size == (40, 25)
    with pytest.raises(BadInput, match="more than 1000 pixels"):
        check_image(Image.new("RGB", (40, 26)))


def test_files_are_named_in_the_refusal(tmp_path):
    empty = tmp_path / "empty.png"
    empty.touch()
    with pytest.raises(BadInput, match="empty.png is empty"):
        check_image(empty)
    with pytest.raises(BadInput, match="none.png cannot be read"):
        check_image(tmp_path / "none.png")
    with pytest.raises(BadInput, match="cannot be read"):
        check_image(tmp_path)


def test_data_url_holds_the_picture():
    url = data_url(Image.new("RGB", (40, 30), (1, 2, 3)))
    head, _, body = url.partition(",")
    again = Image.open(io.BytesIO(base64.b64decode(body)))
    assert head == "data:image/png;base64" and again.size == (40, 30) and again.getpixel((5, 5)) == (1, 2, 3)


def test_turned_photographs_stand_upright():
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(buffer, format="JPEG", exif=exif)
    assert check_image(buffer.getvalue()).size == (20, 40)


def test_pictures_come_before_the_question():
    message = picture_message([png(), png()], "Which?")
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
