"""The room that the fleet's hosts make: two of them hold the model together, four hold it twice."""

LAYERS = 30
MODEL = f"hash:{LAYERS},layer_mb=10,step_ms=2"
FLAGS = "--capacity-mb 220 --no-mdns"
