//! Compiles the wire contracts in `proto/` to Rust.

fn main() -> std::io::Result<()> {
    tonic_prost_build::configure()
        .compile_protos(&["proto/csi.proto", "proto/inspect.proto"], &["proto"])
}
