"""Plans of machines: capacity, gangs, HyperPod, EKS, and what runs at boot."""
