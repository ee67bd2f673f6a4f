"""What runs on the cluster: the engine that trains and the driver that makes it elastic."""
