"""Where a log comes from: a path (plain, gzip, UTF-16), a file object or lines; always blocks of UTF-8 bytes."""

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from .errors import BadInput

BLOCK, LINES = 1 << 20, 4096  # bytes of a block, lines of one where lines are given
RECORDED = Path(__file__).parent / "data" / "logs"


def blocks(source: str | Path | IO | Iterable[str | bytes]) -> Iterator[bytes]:
    """Blocks of at most about 1 MiB. A path that cannot be read, is empty or binary raises BadInput."""
    if isinstance(source, str | Path):
        yield from _from_path(Path("/dev/stdin" if str(source) == "-" else source).expanduser())
    elif hasattr(source, "read"):
        while block := source.read(BLOCK):
            yield _utf8(block)
    else:
        lines = map(_utf8, source)
        while some := list(islice(lines, LINES)):
            yield b"".join(line if line.endswith(b"\n") else line + b"\n" for line in some)


def _utf8(text: str | bytes) -> bytes:
    return text.encode("utf-8", "replace") if isinstance(text, str) else text


def _from_path(path: Path) -> Iterator[bytes]:
    some = b""
    try:
        if path.is_dir():
            raise BadInput(f"{path} is a folder; name the log file in it.")
        with path.open("rb") as file:
            head, read = file.peek(4096)[:4096], file.read
            if not head:
                mend = "the output of `vllm serve … 2>&1 | tee FILE`"
                raise BadInput(f"{path} is empty; a vLLM log was expected, for example {mend}.")
            if head.startswith(b"\x1f\x8b"):
                read = gzip.GzipFile(fileobj=file).read1
            elif head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # of a shell that redirects so
                read = codecs.EncodedFile(file, "utf-8", "utf-16", "replace").read
            elif b"\0" in head:
                raise BadInput(f"{path} is a binary file, not a log; give the text that `vllm serve` printed.")
            while some := read(BLOCK):
                yield some
    except (EOFError, zlib.error, gzip.BadGzipFile):  # a cut-off file ends where the good data ends
        if not some:
            raise BadInput(f"{path} is a damaged gzip file; give the log itself or a whole copy.") from None
    except OSError as problem:
        why = problem.strerror or type(problem).__name__
        raise BadInput(f"{path} cannot be read ({why}); give the path of a vLLM log.") from None
    except ValueError as problem:  # a null byte in the path
        raise BadInput(f"{str(path)!r} is no usable path ({problem}).") from None


def recorded(name: str = "") -> Path:
    """A start-up log shipped with the book, named by a part of its file name that fits one only; "" is the H200's."""
    files = sorted(RECORDED.glob("*.log"))
    found = [f for f in files if (name or "qwen3.5-4b-32768.log") in f.name]
    if len(found) == 1:
        return found[0]
    raise BadInput(f"{name!r} fits {len(found)} of the recorded logs; there are {', '.join(f.stem for f in files)}.")
