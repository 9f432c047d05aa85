"""HTML pages: alignment, caches, projections, regions, completions and runs."""
