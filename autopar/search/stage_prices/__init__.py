"""The prices of a pipeline whose stages are cut, placed and scheduled."""
