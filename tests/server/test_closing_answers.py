"""Answers to connections that are closed at once."""

import http.client
import io
import json

import pytest

from proxy.server.closing_answers import FULL, HEAD_TOO_LARGE, OUT_OF_DESCRIPTORS, UNREADABLE


class Received:
    """What ``http.client`` reads an answer from in place of a socket."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, _mode: str) -> io.BytesIO:
        """The bytes of the answer as a file."""
        return io.BytesIO(self._answer)


@pytest.mark.parametrize(
    ("answer", "status", "code", "setting"),
    [
        (UNREADABLE, 400, "invalid_request", "HTTP/1.1"),
        (HEAD_TOO_LARGE, 431, "request_header_fields_too_large", "server.limits.head"),
        (FULL, 503, "overloaded", "server.limits.connections"),
        (OUT_OF_DESCRIPTORS, 503, "overloaded", "open files"),
    ],
)
def test_each_is_a_whole_answer_that_names_the_limit(answer: bytes, status: int, code: str, setting: str) -> None:
    """An HTTP client reads the error to its end, and learns that the connection is closed behind it."""
    response = http.client.HTTPResponse(Received(answer))
    response.begin()
    error = json.loads(response.read())["error"]
    assert (response.status, error["code"], response.getheader("connection")) == (status, code, "close")
    assert setting in error["message"]
    assert (response.getheader("retry-after") == "1") == (status == 503)
