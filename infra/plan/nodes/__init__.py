"""Plans of machines: capacity, Auto Scaling groups, HyperPod, EKS, and what runs at boot."""
