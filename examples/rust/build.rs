//! Generates the client of the contract with protoc, which is found on the path or in `PROTOC`.
use std::path::Path;

fn main() -> std::io::Result<()> {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../protos");
    let files = ["admin", "executor", "tokenizer"].map(|name| protos.join(format!("ferrule/v1/{name}.proto")));
    tonic_prost_build::configure()
        .build_server(false)
        .include_file("contract.rs")
        .compile_protos(&files, &[protos.clone(), protos.join("third_party")])
}
