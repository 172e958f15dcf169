"""Names and paths to labelled rows, split, verified and changed on purpose."""
