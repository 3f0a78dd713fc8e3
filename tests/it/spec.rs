//! `proto/csi.proto` against the standard's own descriptor.

use std::{path::Path, process::Command};

#[test]
fn our_csi_proto_says_what_the_standard_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile::tempdir().unwrap();
    let ours = scratch.path().join("csi.binpb");
    let compiled = Command::new("protoc")
        .arg("-I")
        .arg(root.join("proto"))
        .arg("--include_imports")
        .arg("--descriptor_set_out")
        .arg(&ours)
        .arg("csi.proto")
        .status()
        .expect("protoc is there; run `make setup`");
    assert!(compiled.success());
    let compare = |arguments: &[&str], file: &Path| {
        let go = Command::new("go")
            .args(arguments)
            .arg(file)
            .current_dir(root.join("tests/spec"))
            .output()
            .expect("go is there");
        let text = [go.stdout, go.stderr].concat();
        (go.status.success(), String::from_utf8_lossy(&text).into_owned())
    };
    let (same, text) = compare(&["run", "."], &ours);
    assert!(
        same && text.contains("5 services, 32 methods") && text.contains(": identical"),
        "{text}"
    );
    // And the comparison can fail: the Go tests change the standard in every way it looks at.
    let (passed, text) = compare(&["test"], Path::new("."));
    assert!(passed, "{text}");
}
