"""The route ``/v1/compress``: the view of a request as its answer, and nothing is forwarded."""
