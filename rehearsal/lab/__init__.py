"""Several real nodes on one machine: namespaces with their own sshd, disk, memory file systems, PID 1 and network.

`nodes.Lab` starts them, `hardware` says what each pretends to be made of, `programs` are what stands in for programs
of hardware that is not there. What a lab cannot show is listed in `hardware.LEFT_OUT`.
"""
