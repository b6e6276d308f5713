"""Tool results capped before they are first sent."""
