"""Data sets: read, split, dealt out to workers."""
