"""Studies: one file a notebook; each turns trained runs into tidy tables."""
