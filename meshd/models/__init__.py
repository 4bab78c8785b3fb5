"""Model store: what a model is made of, its identity, where it lies on disk, and how it gets there."""
