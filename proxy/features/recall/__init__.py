"""Lets a model read items that left its view, with a tool that Ullage answers."""
