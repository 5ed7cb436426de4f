"""One runnable module for each question: `python -m experiments.NAME`."""
