"""Makes tests/reference.py importable by the tests of every folder."""
