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
    width: int, height: int, *, patch: int = 16, merge: int = 2, min_pixels: int = 65_536, max_pixels: int = 16_777_216
) -> ImageTokens:
    """Tokens that a picture of width x height pixels takes in the prompt, exactly.

    Both sides go to the nearest multiple of patch * merge; beyond max_pixels (below min_pixels) both are scaled by
    the same factor first and rounded down (up). The defaults are those of Qwen3.5's preprocessor_config.json:
    `shortest_edge` and `longest_edge` there are pixel counts, their names notwithstanding.
    Raises BadInput for sides below 1, a side more than 200 times the other, or limits that contradict each other.
    """
    for name, value in (("width", width), ("height", height), ("patch", patch), ("merge", merge)):
        if type(value) is not int or value < 1:
            raise BadInput(f"{name} is {value!r}: it must be a whole number of at least 1.")
    if not 0 < min_pixels <= max_pixels:
        limits = f"min_pixels {min_pixels} and max_pixels {max_pixels}"
        raise BadInput(f"{limits}: the first must be positive and not the larger.")
    _check_aspect(width, height, "the picture")
    unit = patch * merge
    h, w = (round(side / unit) * unit for side in (height, width))
    if h * w > max_pixels:
        scale = math.sqrt((height * width) / max_pixels)
        h, w = (max(unit, math.floor(side / scale / unit) * unit) for side in (height, width))
    elif h * w < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * scale / unit) * unit for side in (height, width))
    tokens = (h // unit) * (w // unit)
    return ImageTokens(width, height, w, h, w // patch, h // patch, tokens, tokens + FRAME_TOKENS, patch, merge)


def _check_aspect(width: int, height: int, name: str) -> None:
    if max(width, height) > LARGEST_ASPECT * min(width, height):
        sides = f"{width} x {height}: one side is more than {LARGEST_ASPECT} times the other"
        raise BadInput(f"{name} is {sides}; crop or pad it.")


def processor_limits(model_dir: str | Path) -> dict[str, int]:
    """patch, merge, min_pixels and max_pixels as a model folder's preprocessor_config.json has them."""
    file = Path(model_dir) / "preprocessor_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        limits = {"min_pixels": config["size"]["shortest_edge"], "max_pixels": config["size"]["longest_edge"]}
        return {"patch": config["patch_size"], "merge": config["merge_size"], **limits}
    except (OSError, ValueError, KeyError, TypeError) as error:
        lacks = f"cannot be read for patch_size, merge_size and size ({type(error).__name__}: {error})"
        raise BadInput(f"{file} {lacks}: give the folder of a model with Qwen's picture processor.") from error


def check_image(source: str | Path | bytes | Image) -> Image:
    """Open, decode fully and return one still picture as RGB, upright, on white ground; everything that a server would
    choke on is refused.

    Raises BadInput for a missing, empty, broken or cut-off file, another format, an animation, a decompression bomb
    (by Pillow's own limit of 89 million pixels announced), and sides that no processor takes.
    """
    from PIL import Image as pil
    from PIL import ImageOps, UnidentifiedImageError

    name = f"the picture of {len(source)} bytes" if isinstance(source, bytes) else str(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about odd headers: what matters is refused below
            warnings.simplefilter("error", pil.DecompressionBombWarning)
            picture = source if isinstance(source, pil.Image) else pil.open(_file(source, name), formats=FORMATS)
            if getattr(picture, "is_animated", False):
                raise BadInput(f"{name} has {picture.n_frames} frames: send one of them as a still picture.")
            _check_aspect(*picture.size, name)
            if picture.width * picture.height > (pil.MAX_IMAGE_PIXELS or math.inf):  # one made or opened by the caller
                raise pil.DecompressionBombError
            picture.load()
            picture = ImageOps.exif_transpose(picture)
            if picture.has_transparency_data:
                ground = pil.new("RGBA", picture.size, "white")
                picture = pil.alpha_composite(ground, picture.convert("RGBA"))
            return picture.convert("RGB")
    except (pil.DecompressionBombError, pil.DecompressionBombWarning):
        limit = f"more than {pil.MAX_IMAGE_PIXELS} pixels"
        raise BadInput(f"{name} unpacks to {limit}: refused as a decompression bomb; resize it.") from None
    except UnidentifiedImageError:
        raise BadInput(f"{name} is not a picture of a known kind: expected {', '.join(FORMATS)}.") from None
    except BadInput:
        raise
    except Exception as error:  # Pillow raises many kinds on broken files
        if why := getattr(error, "strerror", None):
            raise BadInput(f"{name} cannot be read ({why}): give the path of a picture.") from error
        broken = f"{name} is cut off or broken ({' '.join(str(error).split())})"
        raise BadInput(f"{broken}: fetch or save it again.") from error


def _file(source: str | Path | bytes, name: str) -> Path | io.BytesIO:
    """A file as Pillow opens it; BadInput for what is none, or is empty."""
    if not isinstance(source, (bytes, str, Path)):
        raise BadInput(f"a picture must be a path, bytes or a PIL image, not {type(source).__name__}.")
    if name.startswith(("http://", "https://", "data:")):
        raise BadInput("check_image takes a file or bytes, not a URL: nothing is fetched unless you fetch it yourself.")
    if not (source if isinstance(source, bytes) else Path(source).stat().st_size):
        raise BadInput(f"{name} is empty (0 bytes): give a picture.")
    return io.BytesIO(source) if isinstance(source, bytes) else Path(source)


def data_url(image: str | Path | bytes | Image) -> str:
    """The picture, checked, as a `data:image/png;base64,...` URL: it travels inside the request, nothing is fetched."""
    buffer = io.BytesIO()
    check_image(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def picture_message(images: list, question: str) -> dict:
    """One user message: the pictures in order, each as a data URL, then the question."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
