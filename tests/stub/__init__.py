"""A strict, scriptable, fault-injecting OpenAI-compatible upstream for tests."""

from tests.stub.answers import Answer, Call
from tests.stub.faults import Fault
from tests.stub.record import Seen, slices
from tests.stub.rules import Rules, Verdict, judge
from tests.stub.server import Stub

__all__ = ["Answer", "Call", "Fault", "Rules", "Seen", "Stub", "Verdict", "judge", "slices"]
