"""Inputs to unit rows: networks, their training, and the runs it leaves behind."""
