"""A dissected request through a TCP proxy that delays, merges and splits what the server sends."""

import asyncio
import threading
from contextlib import contextmanager

import pytest
from openai import OpenAI
from replay import recorded, replay

from qrecipe.request import dissect

STREAMS = ["plain", "thinking", "thinking-zh", "held-back", "usage-last", "tool-named", "two-choices"]


class Proxy:
    """Copies bytes between a client and the server on `port`; what the server sends goes through `shape` piece by piece."""

    def __init__(self, port, *, split=None, merge=0.0, delay=0.0):
        self.port, self.split, self.merge, self.delay, self.pieces = port, split, merge, delay, 0

    async def upstream(self, reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def downstream(self, reader, writer):
        queue = asyncio.Queue()

        async def send():
            clock = asyncio.get_running_loop().time
            while (item := await queue.get()) is not None:
                due, data = item
                if self.merge:  # wait for more, and send it as one
                    await asyncio.sleep(self.merge)
                    while not queue.empty() and queue._queue[0] is not None:
                        data += queue.get_nowait()[1]
                await asyncio.sleep(max(0, due - clock()))
                size = self.split or len(data)
                for i in range(0, len(data), size):
                    writer.write(data[i : i + size])
                    await writer.drain()
                    await asyncio.sleep(0)
                    self.pieces += 1
            writer.close()

        sending = asyncio.create_task(send())
        while data := await reader.read(65536):
            queue.put_nowait((asyncio.get_running_loop().time() + self.delay, data))
        queue.put_nowait(None)
        await sending

    async def connected(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(self.upstream(reader, back), self.downstream(there, writer), return_exceptions=True)


@contextmanager
def between(port, **how):
    """Yields (the proxy's base_url, the proxy)."""
    proxy, ready = Proxy(port, **how), threading.Event()

    async def run():
        nonlocal loop, done, server
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(proxy.connected, "127.0.0.1", 0)
        ready.set()
        await done.wait()
        server.close()

    loop = done = server = None
    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    ready.wait(5)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", proxy
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(5)


def ask(name, speed=20.0, **how):
    """(dissected directly, through the proxy, the proxy) of one recorded stream."""
    with replay(recorded(name, speed), recorded(name, speed)) as (url, _):
        with between(int(url.rsplit(":", 1)[1].split("/")[0]), **how) as (through, proxy):
            n = {"n": 2} if name == "two-choices" else {}
            message = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | n
            both = []
            for address in (url, through):
                with OpenAI(base_url=address, api_key="none") as client:
                    both.append(dissect(client, **message))
    return *both, proxy


@pytest.mark.parametrize("how", [{"split": 1}, {"split": 7}, {"merge": 0.05}, {"merge": 0.02, "split": 100}, {"delay": 0.1}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", STREAMS)
def test_what_a_proxy_does_to_the_bytes_changes_no_count_and_no_word(name, how):
    direct, through, proxy = ask(name, **how)
    assert proxy.pieces > 0 and through.complete
    for what in (
        "texts",
        "reasonings",
        "tool_calls",
        "finish_reasons",
        "usage",
        "completion_tokens",
        "counted_by",
        "notes",
    ):
        assert getattr(through, what) == getattr(direct, what), what
    assert [(c.kind, c.text, c.tokens) for c in through.chunks] == [(c.kind, c.text, c.tokens) for c in direct.chunks]
    assert [spread for _, _, spread in through.gaps()] == [spread for _, _, spread in direct.gaps()]
    times = [c.t for c in through.chunks]
    assert times == sorted(times) and through.ttft <= through.e2e


def test_a_delay_moves_the_first_token_and_not_the_gaps():
    direct, through, _ = ask("plain", speed=1.0, delay=0.3)
    assert through.ttft - direct.ttft == pytest.approx(0.3, abs=0.1)
    assert through.tpot == pytest.approx(direct.tpot, rel=0.2, abs=0.003)


def test_merged_events_arrive_together_and_keep_the_mean():
    direct, through, proxy = ask("plain", speed=1.0, merge=0.1)
    assert proxy.pieces < len(through.chunks) / 2
    assert max(through.itl) > 2 * max(direct.itl[1:]) and min(through.itl) < 0.005
    assert through.tpot == pytest.approx(direct.tpot, rel=0.3, abs=0.003)
