"""Training jobs on this machine: processes, run folders and signals behind `train` and `compare`."""
