"""Tables, pictures and web pages from the files of runs, benchmarks and predictions."""
