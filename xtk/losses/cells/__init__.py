"""The mechanisms of losses: which events are compared, and how a student's probabilities add up to them."""
