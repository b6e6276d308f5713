"""The test suite; a package so that its parts run as programs (``python -m tests.stub``)."""
