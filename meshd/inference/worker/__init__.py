"""The engine worker: the one process that imports torch and transformers, and imports them `lean`."""

from meshd.inference.worker import lean

lean.install()
