"""The wire ring: the only package that imports grpc and ferrule.v1."""
