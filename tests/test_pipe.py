"""One direction of a raw connection."""

import asyncio

from proxy.pipe import MAX_BUFFERED, Pipe


class Source:
    """A connection that records if its reading is paused."""

    paused = False

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False


async def test_bytes_come_out_in_order_and_then_the_end():
    """Everything fed comes out once, in order; after the end only the end."""
    pipe = Pipe(Source())
    pipe.feed_data(b"a")
    pipe.feed_data(b"b")
    pipe.feed_eof()
    assert [await pipe.next(), await pipe.next(), await pipe.next()] == [b"ab", b"", b""]


async def test_a_waiting_reader_gets_what_comes_and_a_cancelled_one_loses_nothing():
    """A reader that waits is woken; one that gave up before leaves the bytes for the next."""
    pipe = Pipe(Source())
    waiting = asyncio.ensure_future(pipe.next())
    await asyncio.sleep(0)
    waiting.cancel()
    pipe.feed_data(b"later")
    assert await pipe.next() == b"later"


async def test_too_much_pauses_the_source_until_it_was_taken():
    """Above the limit the source is paused, and it continues once the bytes are read."""
    source = Source()
    pipe = Pipe(source)
    pipe.feed_data(b"x" * (MAX_BUFFERED + 1))
    assert source.paused
    await pipe.next()
    assert not source.paused
