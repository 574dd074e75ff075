"""Where tensors live while layers are pruned: the device, the host, and how much of either."""
