"""A picture on its way into the prompt: pixels -> resized pixels -> patches -> merged tokens -> prompt tokens.

Qwen3.5's vision tower cuts the resized picture into patches of 16 x 16 pixels and merges 2 x 2 of them into one
token, so a token stands for 32 x 32 pixels. The rule for the resized size is that of transformers' Qwen2-VL image
processor (`smart_resize`), followed here number by number; the tests hold it against the processor itself.
Not covered: video.
"""

from __future__ import annotations

import base64
import io
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LARGEST_ASPECT = 200  # the processor refuses longer and thinner pictures
LARGEST_PIXELS = 89_478_485  # Pillow's own bomb limit: a quarter of a GiB as RGB
LARGEST_FILE = 64 * 2**20
_BOMB = f"{{}} unpacks to {{}} than {LARGEST_PIXELS} pixels: refused as a decompression bomb; resize it."
FRAME_TOKENS = 2  # <|vision_start|> before and <|vision_end|> after the picture's tokens


@dataclass(frozen=True)
class ImageTokens:
    """What becomes of one picture. Pixels, patches (`grid_*`), tokens after merging, tokens in the prompt."""

    width: int
    height: int
    resized_w: int
    resized_h: int
    grid_w: int
    grid_h: int
    tokens: int
    prompt_tokens: int
    patch: int = 16
    merge: int = 2

    @property
    def patches(self) -> int:
        return self.grid_w * self.grid_h


def image_tokens(
    width: int,
    height: int,
    *,
    patch: int = 16,
    merge: int = 2,
    min_pixels: int = 65_536,
    max_pixels: int = 16_777_216,
) -> ImageTokens:
    """Tokens that a picture of width x height pixels takes in the prompt, exactly.

    Both sides go to the nearest multiple of patch * merge; beyond max_pixels (below min_pixels) both are scaled by
    the same factor first and rounded down (up). The defaults are those of Qwen3.5's preprocessor_config.json:
    `shortest_edge` and `longest_edge` there are pixel counts, their names notwithstanding.
    Raises BadInput for sides below 1, a side more than 200 times the other, or limits that contradict each other.
    """
    for name, value in (("width", width), ("height", height), ("patch", patch), ("merge", merge)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{name} is {value!r}: it must be a whole number of at least 1.")
    if not 0 < min_pixels <= max_pixels:
        raise BadInput(
            f"min_pixels {min_pixels} and max_pixels {max_pixels}: the first must be positive and not the larger."
        )
    _check_aspect(width, height, "the picture")
    unit = patch * merge
    h, w = round(height / unit) * unit, round(width / unit) * unit
    if h * w > max_pixels:
        scale = math.sqrt((height * width) / max_pixels)
        h = max(unit, math.floor(height / scale / unit) * unit)
        w = max(unit, math.floor(width / scale / unit) * unit)
    elif h * w < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        h = math.ceil(height * scale / unit) * unit
        w = math.ceil(width * scale / unit) * unit
    tokens = (h // unit) * (w // unit)
    return ImageTokens(width, height, w, h, w // patch, h // patch, tokens, tokens + FRAME_TOKENS, patch, merge)


def _check_aspect(width: int, height: int, name: str) -> None:
    if max(width, height) / min(width, height) > LARGEST_ASPECT:
        raise BadInput(
            f"{name} is {width} x {height}: one side is more than {LARGEST_ASPECT} times the other; crop or pad it."
        )


def processor_limits(model_dir: str | Path) -> dict[str, int]:
    """patch, merge, min_pixels and max_pixels as a model folder's preprocessor_config.json has them."""
    file = Path(model_dir) / "preprocessor_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        size = config["size"]
        return {
            "patch": config["patch_size"], "merge": config["merge_size"],
            "min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"],
        }  # fmt: skip
    except OSError as error:
        raise BadInput(
            f"{file} cannot be read ({error.strerror}): give the folder of a model with a vision tower."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file} does not give patch_size, merge_size and size ({error}): it is no Qwen picture processor's."
        ) from error


def check_image(source: str | Path | bytes | Image) -> Image:
    """Open, decode fully and return one still picture as RGB; everything that a server would choke on is refused.

    Raises BadInput for a missing, empty, broken or cut-off file, another format, an animation, a decompression bomb
    (more than 89 million pixels announced), and sides that no processor takes.
    """
    from PIL import Image as pil
    from PIL import UnidentifiedImageError

    data, name = (source, "the picture") if isinstance(source, pil.Image) else _read(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about odd headers: what matters is refused below
            return _still(data if isinstance(data, pil.Image) else pil.open(io.BytesIO(data), formats=FORMATS), name)
    except BadInput:
        raise
    except UnidentifiedImageError:
        raise BadInput(f"{name} is not a picture of a known kind: expected {', '.join(FORMATS)}.") from None
    except pil.DecompressionBombError:
        raise BadInput(_BOMB.format(name, "far more")) from None
    except Exception as error:  # Pillow raises many kinds on broken files
        raise BadInput(
            f"{name} is cut off or broken ({' '.join(str(error).split())}): fetch or save it again."
        ) from error


def _still(picture: Image, name: str) -> Image:
    """One picture, decoded fully, upright, on white ground, as RGB. BadInput for what no processor should see."""
    from PIL import Image as pil
    from PIL import ImageOps

    width, height = picture.size
    if width < 1 or height < 1:
        raise BadInput(f"{name} is {width} x {height} pixels: there is nothing in it.")
    if width * height > LARGEST_PIXELS:
        raise BadInput(_BOMB.format(name, f"{width} x {height}, more"))
    if getattr(picture, "is_animated", False):
        raise BadInput(f"{name} has {picture.n_frames} frames: send one of them as a still picture.")
    _check_aspect(width, height, name)
    picture.load()
    picture = ImageOps.exif_transpose(picture)
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = pil.alpha_composite(pil.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    return picture.convert("RGB")


def _read(source: str | Path | bytes) -> tuple[bytes, str]:
    """The bytes of a file, or those given, and what to call them in an error."""
    if not isinstance(source, (bytes, str, Path)):
        raise BadInput(f"a picture must be a path, bytes or a PIL image, not {type(source).__name__}.")
    if not isinstance(source, bytes) and str(source).startswith(("http://", "https://", "data:")):
        raise BadInput("check_image takes a file or bytes, not a URL: nothing is fetched unless you fetch it yourself.")
    name = f"the picture of {len(source)} bytes" if isinstance(source, bytes) else str(source)
    try:
        size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
        if size > LARGEST_FILE:
            raise BadInput(f"{name} is larger than {LARGEST_FILE // 2**20} MiB: save it smaller.")
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise BadInput(f"{name} cannot be read ({error.strerror}): give the path of a picture.") from error
    if not data:
        raise BadInput(f"{name} is empty (0 bytes): give a picture.")
    return data, name


def data_url(image: str | Path | bytes | Image) -> str:
    """The picture, checked, as a `data:image/png;base64,...` URL: it travels inside the request, nothing is fetched."""
    buffer = io.BytesIO()
    check_image(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def picture_message(images: list, question: str) -> dict:
    """One user message: the pictures in order, each as a data URL, then the question."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
