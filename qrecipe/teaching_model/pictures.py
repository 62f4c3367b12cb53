"""The book's drawn pictures: one flat figure on a plain background, and what the teaching model says about it.

`draw` makes the picture that a chapter sends; `random_picture` makes those that the model is trained and tested on.
"""

from __future__ import annotations

import math
import random
from itertools import product
from typing import TYPE_CHECKING

from qrecipe.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

SHAPES = {"circle": "圆形", "square": "正方形", "triangle": "三角形", "star": "五角星"}
COLOURS = {
    "red": ("红色", (220, 40, 40)),
    "green": ("绿色", (30, 150, 60)),
    "blue": ("蓝色", (40, 80, 210)),
    "yellow": ("黄色", (240, 200, 30)),
    "purple": ("紫色", (140, 50, 170)),
    "black": ("黑色", (25, 25, 25)),
}
FIGURES = [None, *product(SHAPES, COLOURS)]  # None: a picture without a figure
QUESTIONS = {"en": "What is in this picture?", "zh": "这张图里有什么？"}
_FINE = 3  # drawn this many times larger, then made smaller, so that slanted edges are smooth


def _corners(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Every other corner of a star lies further in; the square stands on a side, its half side is 0.8 of the radius."""
    count, inner, size, turn = {
        "square": (4, 1.0, 0.8 * math.sqrt(2), 0.5),
        "triangle": (3, 1.0, 1.0, 0.0),
        "star": (10, 0.38, 1.0, 0.0),
    }[shape]
    corners = []
    for n in range(count):
        angle, far = 2 * math.pi * (n + turn) / count, radius * size * (inner if n % 2 else 1.0)
        corners.append((x + far * math.sin(angle), y - far * math.cos(angle)))
    return corners


def _paint(shape, fill, width, height, x, y, radius, background) -> Image:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), background)
    # Only the box around the figure is drawn fine: the rest is one colour.
    left, top = math.floor(x - radius) - 1, math.floor(y - radius) - 1
    side = math.ceil(2 * radius) + 3
    tile = Image.new("RGB", (side * _FINE, side * _FINE), background)
    pen, cx, cy, r = ImageDraw.Draw(tile), (x - left) * _FINE, (y - top) * _FINE, radius * _FINE
    if shape == "circle":
        pen.ellipse((cx - r, cy - r, cx + r, cy + r), fill=fill)
    else:
        pen.polygon(_corners(shape, cx, cy, r), fill=fill)
    image.paste(tile.resize((side, side), Image.Resampling.BOX), (left, top))
    return image


def draw(
    shape: str,
    colour: str,
    *,
    width: int = 448,
    height: int = 448,
    centre: tuple[float, float] | None = None,
    radius: float | None = None,
    background: str | tuple[int, int, int] = "white",
) -> Image:
    """A picture of `width` × `height` pixels with one figure.

    `centre` (pixels from the upper left corner) is the middle by default, `radius` (pixels, of the circle around the
    figure) a quarter of the shorter side.
    """
    if shape not in SHAPES or colour not in COLOURS:
        raise BadInput(
            f"there is no figure {colour} {shape}; shapes are {', '.join(SHAPES)}, colours {', '.join(COLOURS)}."
        )
    x, y = centre or (width / 2, height / 2)
    return _paint(shape, COLOURS[colour][1], width, height, x, y, radius or min(width, height) / 4, background)


def random_picture(
    rng: random.Random,
    *,
    sides: tuple[int, int] = (256, 448),
    step: int = 32,
    empty: float = 0.0,
    radii: tuple[float, float] = (0.14, 0.42),
) -> tuple[Image, tuple[str, str] | None]:
    """A picture and the (shape, colour) of its figure, all at random: sides, place, size, tint, pale background.

    Sides are `step` pixels apart within `sides`, and `radii` are in shares of the shorter side. With the chance `empty` there is no figure: the picture is of
    one colour, any, and None stands for the figure.
    """
    width, height = (rng.randrange(sides[0], sides[1] + 1, step) for _ in range(2))
    if rng.random() < empty:
        from PIL import Image

        return Image.new("RGB", (width, height), tuple(rng.randint(0, 255) for _ in range(3))), None
    shape, colour = rng.choice(list(SHAPES)), rng.choice(list(COLOURS))
    radius = min(width, height) * rng.uniform(*radii)
    x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
    fill = tuple(min(255, max(0, value + rng.randint(-15, 15))) for value in COLOURS[colour][1])
    background = "white" if rng.random() < 0.4 else tuple(rng.randint(215, 255) for _ in range(3))
    return _paint(shape, fill, width, height, x, y, radius, background), (shape, colour)


def reply(figure: tuple[str, str] | None, language: str = "en") -> tuple[str, str]:
    """(reasoning, content): what the model says about a picture of a (shape, colour), or of none."""
    shape, colour = figure or ("", "")
    if language == "zh":
        what = f"有一个{COLOURS[colour][0]}的{SHAPES[shape]}" if figure else "没有图形，只有一种颜色"
        return "先看背景，再看上面的图形：有没有，什么颜色，什么形状。", f"图里{what}。"
    what = f"a {colour} {shape}" if figure else "no figure, only one colour"
    look = "First the background, then the figure on it: is there one, of what colour, of what shape?"
    return look, f"The picture shows {what}."
