"""Where a log comes from: a path (plain, gzip, UTF-16), a file object or lines; always blocks of UTF-8 bytes."""

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import BadInput

BLOCK = 1 << 20


def blocks(source: str | Path | IO | Iterable[str | bytes]) -> Iterator[bytes]:
    """Blocks of at most about 1 MiB. A path that cannot be read, is empty or binary raises BadInput."""
    if isinstance(source, str | Path):
        yield from _from_path(Path(source).expanduser())
    elif hasattr(source, "read"):
        yield from _utf8(iter(lambda: source.read(BLOCK), None))
    else:
        yield from _utf8(_joined(source))


def _from_path(path: Path) -> Iterator[bytes]:
    try:
        if path.is_dir():
            raise BadInput(f"{path} is a folder; name the log file in it.")
        with path.open("rb") as raw:
            head = raw.read(4096)
            raw.seek(0)
            zipped = head[:2] == b"\x1f\x8b"
            if not head:
                raise BadInput(
                    f"{path} is empty; a vLLM log was expected, for example the output of `vllm serve … 2>&1 | tee FILE`."
                )
            if not zipped and b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise BadInput(f"{path} is a binary file, not a log; give the text that `vllm serve` printed.")
            yield from _utf8(_unzipped(raw, path) if zipped else iter(lambda: raw.read(BLOCK), b""))
    except OSError as problem:
        why = problem.strerror or type(problem).__name__
        raise BadInput(f"{path} cannot be read ({why}); give the path of a vLLM log.") from None
    except ValueError as problem:  # a null byte in the path
        raise BadInput(f"{str(path)!r} is no usable path ({problem}).") from None


def _unzipped(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    """The content of a gzip file; a cut-off file ends where the good data ends."""
    some = False
    with gzip.GzipFile(fileobj=raw) as file:
        while True:
            try:
                block = file.read1(BLOCK)
            except (EOFError, zlib.error, gzip.BadGzipFile):
                if not some:
                    raise BadInput(f"{path} is a damaged gzip file; give the log itself or a whole copy.") from None
                return
            if not block:
                return
            some = True
            yield block


def _joined(lines: Iterable[Any]) -> Iterator[bytes]:
    kept, size = [], 0
    for line in lines:
        raw = line.encode("utf-8", "replace") if isinstance(line, str) else bytes(line)
        kept.append(raw if raw.endswith(b"\n") else raw + b"\n")
        size += len(raw)
        if size >= BLOCK:
            yield b"".join(kept)
            kept, size = [], 0
    yield b"".join(kept)


def _utf8(source: Iterator[str | bytes]) -> Iterator[bytes]:
    """Bytes as they are; text encoded; UTF-16 (a shell that redirects so) recoded."""
    decoder = None
    for number, block in enumerate(source):
        if not block:
            return
        raw = block.encode("utf-8", "replace") if isinstance(block, str) else block
        if number == 0 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            decoder = codecs.getincrementaldecoder("utf-16")("replace")
        yield decoder.decode(raw).encode("utf-8", "replace") if decoder else raw


RECORDED = Path(__file__).parent / "data" / "logs"


def recorded(name: str = "") -> Path:
    """A start-up log shipped with the book, named by a part of its file name that fits one only; "" is the H200's."""
    files = sorted(RECORDED.glob("*.log"))
    found = [f for f in files if (name or "qwen3.5-4b-32768.log") in f.name]
    if len(found) == 1:
        return found[0]
    raise BadInput(f"{name!r} fits {len(found)} of the recorded logs; there are {', '.join(f.stem for f in files)}.")
