//! The messages and services that `proto/` compiles to.

#![expect(
    missing_docs,
    clippy::pedantic,
    clippy::as_conversions,
    reason = "generated; documented in proto/"
)]

/// CSI v1.12.
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// What CSI has no message for.
pub mod inspect {
    tonic::include_proto!("qsd_csi.inspect.v1");
}
