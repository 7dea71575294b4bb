"""Generated messages and stubs of package `ferrule.v1`; see `protos/README.md` for the contract."""
