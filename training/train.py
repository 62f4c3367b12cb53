"""Teach the tiny model its answers: `python training/train.py qrecipe/teaching_model/trained.safetensors`.

Two stages, 543 s in all on two cores (2026-11-30; the model it made then gave 40 of 40 answers word for word and told 97
of 100 new pictures right). The shipped weights had 140 steps in the second stage instead of 110, 618 s in all: 99 of 100.
First the vision tower alone learns figures: every patch token has to tell the shape and the colour in its picture. Then
language model and tower learn together what to say. Only the embedding
rows of tokens in use are trained; beside them a sample of the fixed rows, drawn anew at every step, stands for the
other 247,000 tokens. Weights are rounded to bfloat16 before every forward pass, so what is learned is what is shipped.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch
from delta_rule import chunk_gated_delta_rule
from lesson import IMAGE, Example, Lesson
from torch import Tensor, nn
from torch.nn import functional as F

from qrecipe.teaching_model.build import FOLDER, config
from qrecipe.teaching_model.pictures import COLOURS, SHAPES, random_picture
from qrecipe.teaching_model.tokenizer import write_tokenizer
from qrecipe.teaching_model.weights import EMBEDDING, IDS, POSITIONS, ROWS, generated_rows, write_safetensors

VISION_STEPS, VISION_BATCH, VISION_RATE = 600, 32, 2e-3
STEPS, RATE, TOWER_RATE = 110, 6e-3, 3e-4


def _rate(done: int, steps: int) -> float:
    """Share of the full learning rate after `done` of the steps: 15 to warm up, then flat, then down a cosine to 8 %."""
    return min(1.0, (done + 1) / 15) * (0.08 + 0.92 * min(1.0, 0.75 * (1 + math.cos(math.pi * done / steps))))


class Rounded:
    """AdamW on float32 copies of `named` parameters, whose own values are those copies rounded to bfloat16."""

    def __init__(self, named: dict[str, nn.Parameter], rates: dict[str, float], steps: int):
        self.named = named
        self.exact = {name: p.detach().clone() for name, p in named.items()}
        groups = [
            {"params": [self.exact[n] for n in named if n.startswith(prefix)], "lr": rate}
            for prefix, rate in rates.items()
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adam, lambda done: _rate(done, steps))
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for name, p in self.named.items():
            p.copy_(self.exact[name].to(torch.bfloat16))

    @torch.no_grad()
    def step(self, rows: int | None = None) -> None:
        """One step with the gradients at hand; of the embedding only the first `rows` rows move."""
        for name, p in self.named.items():
            self.exact[name].grad, p.grad = p.grad, None
            if rows is not None and name.endswith("embed_tokens.weight"):
                self.exact[name].grad[rows:] = 0
        nn.utils.clip_grad_norm_(list(self.exact.values()), 1.0)
        self.adam.step()
        self.schedule.step()
        self.round()


def new_model(vocabulary: int, image_token: int):
    """The model with `vocabulary` embedding rows, float32, weights at random, no learned positions in the tower."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
    from transformers.models.qwen3_5 import modeling_qwen3_5

    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    facts = config()
    facts["text_config"] |= {"vocab_size": vocabulary, "eos_token_id": None}
    facts["image_token_id"] = image_token
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**facts)).float()
    for part in model.model.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
    tower = model.model.visual
    nn.init.normal_(tower.patch_embed.proj.weight, std=0.03)
    nn.init.zeros_(tower.pos_embed.weight)
    # The patch embedding is a convolution without overlap; as a matrix product it is faster on a CPU.
    embed = tower.patch_embed.proj
    tower.patch_embed.forward = lambda pixels: F.linear(pixels, embed.weight.flatten(1), embed.bias)
    nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.1)
    return model


@cache
def _image_processor():
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(FOLDER)


def patches(images) -> tuple[Tensor, Tensor]:
    """Pixels as the tower takes them: [patches, 3 · 2 · 16 · 16], four patches of a token in a row, and the grids.

    Sides must be multiples of 32 pixels: nothing is resized here.
    """
    made = _image_processor()(images=images, return_tensors="pt", do_resize=False)
    return made["pixel_values"], made["image_grid_thw"]


def teach_seeing(tower, rng: random.Random, steps: int) -> None:
    """Stage one: linear layers must read shape and colour from the mean of a picture's tokens, from every token, and
    (the first to learn) from the patches after the first block that have a piece of outline in them."""
    shapes, colours = [None, *SHAPES], [None, *COLOURS]
    sizes = {"mean": 64, "token": 64, "edge": 64}
    heads = nn.ModuleDict({name: nn.Linear(size, len(shapes) + len(colours)) for name, size in sizes.items()})
    first = {}
    hook = tower.blocks[0].register_forward_hook(lambda _, __, out: first.update(out=out))
    named = {f"tower.{n}": p for n, p in tower.named_parameters() if not n.startswith("pos_embed")}
    named |= {f"heads.{n}": p for n, p in heads.named_parameters()}
    adam = Rounded(named, {"": VISION_RATE}, steps)

    def loss(head: str, states: Tensor, shape: Tensor, colour: Tensor) -> Tensor:
        found = heads[head](states)
        return F.cross_entropy(found[:, : len(shapes)], shape) + 0.3 * F.cross_entropy(found[:, len(shapes) :], colour)

    for step in range(steps):
        # Small pictures first: less background to look at, so more steps in the same time.
        sides, least = ((160, 224), 0.2) if step < 0.8 * steps else ((256, 384), 0.14)
        drawn = [random_picture(rng, sides=sides, radii=(least, 0.42), empty=0.04) for _ in range(VISION_BATCH)]
        pixels, grids = patches([image for image, _ in drawn])
        tokens = grids.prod(1) // 4
        kinds = [(shapes.index(s), colours.index(c)) for s, c in (figure or (None, None) for _, figure in drawn)]
        kind = torch.tensor(kinds)
        states = tower(pixels, grid_thw=grids).pooler_output
        each = kind.repeat_interleave(tokens, 0)
        edge = pixels.amax(1) - pixels.amin(1) > 0.15
        mean = torch.stack([part.mean(0) for part in states.split(tokens.tolist())])
        near = edge.view(-1, 4).any(1)
        total = (
            loss("mean", mean, *kind.T) + loss("token", states, *each.T) + loss("token", states[near], *each[near].T)
        )
        total = total + 0.5 * loss("edge", first["out"][edge], *each.repeat_interleave(4, 0)[edge].T)
        total.backward()
        adam.step()
        if step % 50 == 49:
            right = (heads["token"](states)[:, : len(shapes)].argmax(1) == each[:, 0]).float().mean()
            print(f"seeing {step + 1}/{steps}: {right:.1%} of tokens tell the shape", flush=True)
    hook.remove()


def _batches(examples: list[Example]) -> list[list[Example]]:
    """Examples of like length together, pictures apart: little of a batch is padding."""
    kinds: dict[tuple, list[Example]] = {}
    for one in examples:
        room = next((room for room in (32, 64, 96, 128, 192) if len(one) <= room), None)
        kinds.setdefault((bool(one.images), room), []).append(one)
    return list(kinds.values())


def hidden_states(model, lesson: Lesson, batch: list[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """(states [n, 64], compact ids [n], weights [n]) at every place where a token of a reply is to come next."""
    longest = max(map(len, batch)) - 1
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    target, weight = torch.full((len(batch), longest), -1), torch.zeros(len(batch), longest)
    for n, example in enumerate(batch):
        row = torch.tensor([lesson.compact(token) for token in example.prompt + example.reply])
        first, last = len(example.prompt) - 1, len(row) - 1
        ids[n, :last] = row[:-1]
        target[n, first:last] = row[first + 1 :]
        weight[n, first:last] = torch.tensor(example.weights)
    images = [image for example in batch for image in example.images]
    if images:
        pixels, grids = patches(images)
        kinds = (ids == lesson.compact(IMAGE)).int()
        out = model.model(ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds, use_cache=False)
    else:
        out = model.model.language_model(ids, use_cache=False)
    there = target >= 0
    return out.last_hidden_state[there], target[there], weight[there]


def teach_speaking(model, lesson: Lesson, steps: int) -> None:
    """Stage two: in every step the whole book, strangers' questions and pictures."""
    rows = len(lesson.used)
    named = {n: p for n, p in model.named_parameters() if "pos_embed" not in n and n != "lm_head.weight"}
    embedding = model.model.language_model.embed_tokens.weight
    adam = Rounded(named, {"model.language_model": RATE, "model.visual": TOWER_RATE}, steps)
    for step in range(steps):
        shown = lesson.book() + lesson.strangers(8) + lesson.seen(10, (256, 256))
        if step % 4 == 3:
            shown += lesson.seen(1, (320, 640))
        outside = generated_rows(np.concatenate([lesson.fixed, lesson.sampled]), embedding.shape[1])
        with torch.no_grad():
            embedding[rows:] = torch.from_numpy(outside).view(torch.bfloat16)
        total, losses, wrong = sum(sum(one.weights) for one in shown), 0.0, 0
        for batch in _batches(shown):
            states, target, weight = hidden_states(model, lesson, batch)
            logits = states @ embedding.T
            loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / total
            loss.backward()
            losses += loss.item()
            wrong += int((logits.argmax(1) != target)[weight >= 1].sum())
        adam.step(rows)
        if step % 10 == 9:
            print(f"speaking {step + 1}/{steps}: loss {losses:.4f}, {wrong} wrong", flush=True)


def save(model, lesson: Lesson, path: Path) -> None:
    """Write the trained part: every tensor but the positions, and of the embedding the rows in use with their ids."""
    left = (POSITIONS, "lm_head.weight")
    kept = {name: p.detach() for name, p in model.named_parameters() if name not in left}
    kept[ROWS] = kept.pop(EMBEDDING)[: len(lesson.used)]
    tensors = {name: p.to(torch.bfloat16).view(torch.uint16).numpy() for name, p in kept.items()}
    write_safetensors(path, tensors | {IDS: np.array(lesson.used, np.int32)})


def train(path: Path, *, seed: int = 1, share: float = 1.0) -> None:
    """Train from nothing and write the trained part to `path`; `share` of the steps, for a trial."""
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        write_tokenizer(Path(folder))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    lesson = Lesson(tokenizer, random.Random(seed))
    model = new_model(lesson.size, lesson.compact(IMAGE))
    teach_seeing(model.model.visual, lesson.rng, max(1, round(VISION_STEPS * share)))
    teach_speaking(model, lesson, max(1, round(STEPS * share)))
    save(model, lesson, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="file to write, for example trained.safetensors")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="share of the steps, for a trial run")
    options, began = parser.parse_args(), time.time()
    train(**vars(options))
    print(f"{options.path}: {options.path.stat().st_size:,} bytes, {time.time() - began:.0f} s")
