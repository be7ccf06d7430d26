"""The judging of expectations, one module for each family of them: training, slopes over depth, layers of a model."""
