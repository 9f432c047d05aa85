"""Files that xtk reads and writes: caches, projections, data, models, output folders. Layer 3 of the imports."""
