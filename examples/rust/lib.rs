//! The contract: messages and clients, in modules named as the packages of the protos.
include!(concat!(env!("OUT_DIR"), "/contract.rs"));

pub use ferrule::v1;
