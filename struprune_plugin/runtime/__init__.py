"""Placement of tensors: device, offloading, prefetching of the next layer, torch.distributed."""
