"""SageMaker HyperPod, and Cloud Control, through which stacks create its clusters."""
