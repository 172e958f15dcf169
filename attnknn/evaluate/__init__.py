"""Probabilities and labels to numbers: measures, calibration, paired comparisons."""
