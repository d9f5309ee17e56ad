"""Programs of lab nodes that stand in for ones whose hardware or service manager is not there.

Each says in its first lines what it is not. They keep state: in /run/simulated what a reboot loses, in /var/lib/simulated
what it does not. Standard library only, started by `start.run` under the interpreter that runs the lab.
"""
