"""Token counts: the budget of a request, totals by role, prices of media and tool definitions."""
