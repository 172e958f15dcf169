"""Studies: one module a notebook; each turns trained runs into tidy tables."""
