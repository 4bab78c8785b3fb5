"""The device's half: standard library only, one answer per question, everything safe to do twice.

Where things are: `~/.meshd` holds what this package installs (environments, the boot script, the log, how to undo each
preparation); the state folder of `meshd start` keeps its usual place and stays when the installation goes.
"""
