"""When to make a view smaller (schedule), in what order (ladder), and one module per stage."""
