"""What a node counts and times, as Prometheus reads it.

`instruments` owns the metrics that are written to as things happen, `measured` stands in front of the engine and the chain and
writes to them, `collector` reads the other parts' own counters when somebody asks. Names follow Prometheus' conventions: base
units (seconds, bytes), counters end in ``_total``. No label holds anything of a prompt.
"""
