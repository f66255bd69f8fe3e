"""Reports of a run's status: metrics, trackers and Prometheus."""
