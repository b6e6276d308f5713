"""A golden record: what real processes did with some 2,400 requests, to hold a redesign against."""
