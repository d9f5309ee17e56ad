"""SageMaker HyperPod, and Cloud Control, through which it is made."""
