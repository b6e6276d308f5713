"""Is this response a context overflow, of which kind, and what does it state.

``Classifier(rules)`` reads answers: ``answer(status, headers, body, prior)`` a whole one of any status,
``event(value)`` one decoded event or error object. ``EarlyOverflowDetector(classifier, headers)`` watches the beginning
of an answer with status 200, streamed or not, until it is clear what it is; ``LateOverflowDetector(classifier,
headers)`` watches what passes after that. All give ``Overflow | None``.
"""
