"""How what is wrong is put."""

from proxy.settings import SettingsError
from proxy.settings.problems import Problem, key_name
from tests.support.settings_files import problems


def test_all_problems_are_reported_together_in_file_order(tmp_path):
    """One run names everything that is wrong."""
    found = problems(tmp_path, "server:\n  prot: 1\n  port: x\ncompression:\n  high_mark: 7\n  mdoe: on\n")
    assert [problem.line for problem in found] == [2, 3, 5, 6]


def test_a_key_is_named_as_it_is_written():
    """List entries are numbered in brackets, sections joined by dots."""
    assert key_name(("upstreams", 0, "headers", "x-a")) == "upstreams[0].headers.x-a"
    assert key_name(()) == ""


def test_a_problem_says_file_line_key_message_and_remedy():
    """Parts that are not known are left out; the remedy stands on a line of its own."""
    assert str(Problem("f", 3, "a.b", "is wrong", "Fix it.")) == "f:3: a.b: is wrong\n    Fix it."
    assert str(Problem("f", None, "", "is wrong", "Fix it.")) == "f: is wrong\n    Fix it."
    both = SettingsError([Problem("f", 1, "a", "x", "y"), Problem("f", 2, "b", "x", "y")])
    assert str(both).count("\n") == 3
