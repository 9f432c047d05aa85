"""Projection methods: how to map student tokens that the teacher does not have, one module per method."""
