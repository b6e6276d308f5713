"""Recognises context overflows in answers: their kind, and the figures that they state.

``Classifier(rules)`` reads answers: ``answer(status, headers, body, prior)`` a whole one of any status,
``event(value)`` one decoded event or error object. ``EarlyOverflowDetector`` watches the beginning of an answer with
status 200, streamed or not, until its first content. ``LateOverflowDetector`` watches the rest. All of them return
``Overflow | None``.
"""
