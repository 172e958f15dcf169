"""The arena: tables x wrong labels x splits x methods, one resumable cell each.

tables -> problems (split, wrong labels) -> cells (one method on one problem) -> report.
"""
