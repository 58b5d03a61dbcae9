"""Worker processes on this machine: a fork server, a launcher with a pool, and workers to hurt."""
