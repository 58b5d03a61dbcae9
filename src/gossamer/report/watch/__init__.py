"""`gossamer watch`: a run's folder as a live page or a terminal view, while the run trains and afterwards."""
