"""Recall: a tool with which a model reads what left its view, and one answer made of several generations."""
