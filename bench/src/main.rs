//! Latency, memory and throughput of qsd-csi.

fn main() {}
