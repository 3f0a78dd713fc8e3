#![no_main]
#![doc = "Looks for bytes that break `qsd_csi::fuzz::source`."]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qsd_csi::fuzz::source(bytes));
