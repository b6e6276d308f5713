"""Lets a model read what left its view, with a tool that is answered here."""
