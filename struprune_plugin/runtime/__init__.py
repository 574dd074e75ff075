"""Where tensors live: the device, what is offloaded, the next layer's weights, torch.distributed."""
