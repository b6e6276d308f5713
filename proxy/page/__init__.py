"""The page at ``/ullage/``: what it shows, who may see it, and how it is updated."""
