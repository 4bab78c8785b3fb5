"""Provisioning a fleet over SSH: what `deploy/mass-equip` does.

Two halves. `meshd.fleet` runs on the administrator's machine and needs Python 3.11 and OpenSSH, nothing else: it reads who is
to be equipped, decides what to do in which order, and reports. `meshd.fleet.device` runs on the device and needs the standard
library of its Python: it is sent along with every question (agent.py), so nothing has to be there first, and what it does
always fits who asks. Whatever needs meshd itself (a key, an election, a node's id) is asked of the meshd that was installed on
a device.

It lives in the package, and not beside the script, so that it is typed, tested and imported like the rest. It may import
meshd.errors and meshd.vocabulary, which need only the standard library; the daemon imports nothing of it.
"""
