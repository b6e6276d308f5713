"""The shape of a table of tools."""

import pytest
from pydantic import ValidationError

from proxy.settings.tooltable import ToolTable


def test_a_rule_may_have_rules_by_argument():
    """Cases are rules themselves; names may be written as one text."""
    table = ToolTable.model_validate({"map": {"pick": {"by": "do", "cases": {"show": {"kind": "file_read"}}}}})
    assert table.map["pick"].cases["show"].kind == "file_read"
    assert ToolTable.model_validate({"protected": "a, b"}).protected == ("a", "b")


@pytest.mark.parametrize("rule", [{"kind": "reading"}, {"base": 2}, {"limit": -1}, {"unit": "words"}, {"colour": 1}])
def test_what_a_rule_cannot_say(rule):
    """Unknown kinds, units, keys and impossible figures are refused."""
    with pytest.raises(ValidationError):
        ToolTable.model_validate({"map": {"a": rule}})
