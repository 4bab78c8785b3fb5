"""Chaos: a room whose devices are struck at random while clients ask it, and what is said of every answer.

`schedule` (pure) says who is struck when; `netlab` and `box` make hosts with addresses of their own to strike; `clients` ask
without pause; `verdict` (pure) judges each answer and each stall; `experiment` runs it all and `show` lets one watch. What it
judges by: an answer is the undisturbed one, or it is an honest 503 while a range had no replica. Anything else is a fault.

The demo, the tests and the benchmark use the same parts with other numbers.
"""
