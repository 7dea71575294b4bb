"""The KV core: blocks, sequences, lineages and leases as integers. No tensors, no gRPC, no locks."""
