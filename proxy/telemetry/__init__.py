"""What operators see: structured logs and Prometheus metrics, all derived from a frozen report."""
