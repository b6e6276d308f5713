"""Lines that never wait for their reader."""

import os
import threading

from proxy.telemetry.lines import LineWriter


def test_a_full_pipe_costs_lines_not_time():
    """With a reader that does not read, write returns, the buffer is bounded and what did not fit is counted."""
    reader, pipe = os.pipe()
    writer = LineWriter(pipe, most_bytes=100_000)
    line = b"x" * 999 + b"\n"
    done = threading.Event()

    def flood():
        for _ in range(1000):
            writer.write(line)
        done.set()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    assert done.wait(30)
    lost = writer.dropped
    assert 500 < lost < 1000
    got = bytearray()
    while len(got) < (1000 - lost) * 1000:
        got += os.read(reader, 65536)
    assert set(got) == {ord("x"), ord("\n")}
    lost -= 1
    while writer.dropped != lost:  # the room is free again a moment after the last byte was read
        lost = writer.dropped
        writer.write(b"last\n")
    writer.close(10)
    os.close(pipe)
    assert os.read(reader, 100) == b"last\n"
    os.close(reader)


def test_lines_of_several_workers_do_not_mix():
    """Writers that share a slow pipe, as worker processes do, never tear each other's lines."""
    reader, pipe = os.pipe()
    writers = [LineWriter(pipe) for _ in range(3)]
    for number in range(1500):
        for index, writer in enumerate(writers):
            writer.write(bytes([97 + index]) * (200 + number % 300) + b"\n")
    got = bytearray()
    total = 3 * sum(201 + number % 300 for number in range(1500))
    while len(got) < total:
        got += os.read(reader, 10_000)
    assert all(len(set(line)) == 1 for line in got.splitlines())
    for writer in writers:
        writer.close(10)
        assert writer.dropped == 0
    os.close(pipe)
    os.close(reader)


def test_a_gone_reader_costs_lines_only():
    """When the reader has closed the pipe, lines are dropped and counted, and closing returns."""
    reader, pipe = os.pipe()
    os.close(reader)
    writer = LineWriter(pipe)
    writer.write(b"a\n")
    writer.close(10)
    writer.write(b"b\n")
    assert writer.dropped == 2
    os.close(pipe)


def test_a_pipe_that_somebody_made_non_blocking_loses_nothing():
    """A full non-blocking pipe is waited for by the writing thread."""
    reader, pipe = os.pipe()
    os.set_blocking(pipe, False)
    writer = LineWriter(pipe)
    sent = b"".join(b"%06d\n" % number for number in range(40_000))
    writer.write(sent)
    got = bytearray()
    while len(got) < len(sent):
        got += os.read(reader, 65536)
    assert got == sent
    writer.close(10)
    os.close(pipe)
    os.close(reader)
