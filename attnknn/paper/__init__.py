"""Notebooks to pages: plans, executed copies, PDFs, the bound report."""
