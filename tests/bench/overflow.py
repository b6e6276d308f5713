"""How well errors are read: ``python -m tests.bench.overflow``, on the recordings and on what people posted.

Prints recall, false alarms and limits, and those of claims whose requests are known, by what is believed of the window
(at a twelfth of a stated one a sentence alone is not believed, on purpose). Then the same on the recordings of each
provider with all rules left out that only that provider's source speaks for. Plain words of the language stay, so the
second figure is an upper bound for phrasings that nobody has seen.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.rules import read_rules
from proxy.core.overflow.stream import EarlyOverflowDetector, LateOverflowDetector
from proxy.settings import packaged_overflow_rules
from tests.support import overflow_recordings
from tests.support.overflow_claims import CIRCUMSTANCES, HALVES, claims
from tests.support.overflow_reports import reported_errors
from tests.support.overflow_rules import without_sources

NAMES = {
    "azure_openai": ("Azure", "OpenAI"),
    "llama_cpp": ("llama.cpp",),
    "llama_cpp_python": ("llama-cpp-python",),
    "lm_studio": ("LM Studio",),
    "zai": ("Z.ai", "Zhipu"),
    "zhipu": ("Z.ai", "Zhipu"),
    "vertex": ("Vertex", "Gemini"),
    "gemini": ("Gemini", "Vertex"),
    "moonshot": ("Moonshot", "Kimi"),
    "openai_compatible": ("OpenAI-compatible", "gateways"),
    "gateway": ("gateways", "Express", "axum", "nginx"),
    "github_models": ("GitHub",),
}
"""What the rules' sources call a provider, where it is not its own name."""


@dataclass
class Tally:
    """What was found in a number of answers."""

    wanted: int = 0
    recalled: int = 0
    others: int = 0
    alarms: int = 0
    stated: int = 0
    exact: int = 0
    wrong: int = 0

    def add(self, found: Overflow | None, overflow: bool, limit: int | None) -> None:
        """Count one answer."""
        recognised = found is not None and (found.too_long or found.kind == "stop")
        if not overflow:
            self.others += 1
            self.alarms += recognised
            return
        self.wanted += 1
        self.recalled += recognised
        self.stated += limit is not None
        told = found.window if found is not None and recognised else None
        self.exact += limit is not None and told == limit
        self.wrong += told is not None and told != limit

    def __str__(self) -> str:
        share = 100 * self.recalled / max(1, self.wanted)
        limits = 100 * self.exact / max(1, self.stated)
        return (
            f"recall {self.recalled}/{self.wanted} ({share:.0f} %)  false alarms {self.alarms}/{self.others}  "
            f"limits {self.exact}/{self.stated} ({limits:.0f} %)  wrong {self.wrong}"
        )


def judged(classifier: Classifier, row: overflow_recordings.Row) -> Overflow | None:
    """What *row*'s bytes mean, whole, at the beginning of a stream, or behind its first content."""
    headers, body = overflow_recordings.headers(row), overflow_recordings.body_of(row)
    if row["status"] != 200:
        return classifier.answer(row["status"], headers, body)
    content_type, encoding = overflow_recordings.described(headers)
    opening = EarlyOverflowDetector(classifier, content_type, encoding)
    ending = LateOverflowDetector(classifier, encoding)
    opening.feed(body)
    opening.finish()
    ending.feed(body)
    return opening.overflow or ending.overflow or (None if row["stream"] else classifier.answer(200, headers, body))


def tally(classifier: Classifier, rows: Iterable[overflow_recordings.Row]) -> Tally:
    """The figures of *classifier* on *rows*."""
    made = Tally()
    for row in rows:
        made.add(judged(classifier, row), row["overflow"], row["limit"])
    return made


def main() -> int:
    """Print the figures; 1 where the recordings are not at hand."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overflow", description=__doc__)
    parser.add_argument("--each", action="store_true", help="print each provider that is left out")
    given = parser.parse_args()
    data = packaged_overflow_rules()
    whole = Classifier(read_rules(data))
    made = Tally()
    for one in reported_errors():
        made.add(whole.answer(one.status, one.headers, one.body.encode()), one.too_long, one.limit)
    print(f"posted by people     {made}")
    for half in HALVES:
        for circumstance in CIRCUMSTANCES:
            made = Tally()
            for claim in (claim for claim in claims() if claim.half == half):
                found = whole.answer(claim.status, (), claim.body.encode(), claim.prior(circumstance))
                made.add(found, claim.is_overflow, claim.limit)
            print(f"{half:<12} {circumstance:<15} {made}")
    if not overflow_recordings.FILE.is_file():
        print(f"no recordings at {overflow_recordings.FILE} (ULLAGE_SHARED names another folder)", file=sys.stderr)
        return 1
    rows = overflow_recordings.rows()
    print(f"recorded             {tally(whole, rows)}")
    left_out = Tally()
    for provider in sorted({row["provider"] for row in rows}):
        names = NAMES.get(provider, (provider.replace("_", " "),))
        classifier = Classifier(read_rules(without_sources(data, names)))
        theirs = [row for row in rows if row["provider"] == provider]
        for row in theirs:
            left_out.add(judged(classifier, row), row["overflow"], row["limit"])
        if given.each:
            print(f"  without {provider:<18} {tally(classifier, theirs)}")
    print(f"each one left out    {left_out}")
    started = time.perf_counter()
    for row in rows:
        judged(whole, row)
    print(f"time per answer      {1000 * (time.perf_counter() - started) / len(rows):.2f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
