"""When a view is made smaller (schedule), by which stages, and the texts that stand for what left it (view)."""
