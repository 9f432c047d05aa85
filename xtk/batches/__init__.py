"""From documents to a micro-batch: sources, tokens and cells, several teachers, losses per teacher, sums."""
