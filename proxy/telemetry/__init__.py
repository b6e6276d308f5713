"""Logs and metrics for operators, derived from each request's report."""
