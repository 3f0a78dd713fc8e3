//! The calls that were answered, and those that are not yet.

use super::text::{Kind, Text};
use crate::durations::Durations;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// The contracts that are served, which name the methods.
const CONTRACTS: [&str; 2] =
    [include_str!("../../proto/csi.proto"), include_str!("../../proto/inspect.proto")];

/// A path that is no method of ours comes from outside, and must not become a label.
const OTHER: &str = "other";

/// All calls. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Calls(Arc<Mutex<Counted>>);

#[derive(Debug, Default)]
struct Counted {
    took: BTreeMap<(&'static str, &'static str), Durations>,
    open: BTreeMap<&'static str, u64>,
}

/// A call without an answer. One that is dropped was given up by its client.
#[derive(Debug)]
pub(super) struct Call {
    calls: Calls,
    rpc: &'static str,
    code: &'static str,
    begin: Instant,
}

impl Calls {
    /// A call by its path, such as `/csi.v1.Controller/CreateVolume`.
    pub(super) fn begin(&self, path: &str) -> Call {
        let rpc = method(path);
        *self.lock().open.entry(rpc).or_default() += 1;
        Call { calls: self.clone(), rpc, code: "CANCELLED", begin: Instant::now() }
    }

    pub(super) fn write(&self, text: &mut Text) {
        let counted = self.lock();
        let help = "Time of a call, by method and gRPC code";
        let mut family = text.family("qsd_csi_rpc_seconds", Kind::Histogram, help);
        for ((rpc, code), took) in &counted.took {
            family.durations(&[("rpc", rpc), ("code", code)], took);
        }
        let help = "Calls without an answer yet";
        let mut family = text.family("qsd_csi_rpcs_in_flight", Kind::Gauge, help);
        for (rpc, count) in &counted.open {
            family.value(&[("rpc", rpc)], count);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Call {
    /// It was answered with this code.
    pub(super) fn answered(mut self, code: &'static str) {
        self.code = code;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut counted = self.calls.lock();
        counted.took.entry((self.rpc, self.code)).or_default().note(self.begin.elapsed());
        if let Some(open) = counted.open.get_mut(self.rpc) {
            *open = open.saturating_sub(1);
        }
    }
}

/// The method of a path, if it is one of ours.
fn method(path: &str) -> &'static str {
    static METHODS: LazyLock<BTreeSet<&'static str>> = LazyLock::new(|| {
        let lines = CONTRACTS.iter().flat_map(|contract| contract.lines());
        let name = |line: &'static str| line.trim().strip_prefix("rpc ")?.split('(').next();
        lines.filter_map(name).collect()
    });
    let name = path.rsplit('/').next().unwrap_or_default();
    METHODS.get(name).copied().unwrap_or(OTHER)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_methods_of_ours_become_labels() {
        assert_eq!(method("/csi.v1.Node/NodeStageVolume"), "NodeStageVolume");
        assert_eq!(method("/csi.v1.Controller/ControllerExpandVolume"), "ControllerExpandVolume");
        assert_eq!(method("/qsd_csi.inspect.v1.Inspect/Look"), "Look");
        assert_eq!((method("/a/b"), method("")), (OTHER, OTHER));
    }

    #[test]
    fn a_call_that_is_given_up_is_counted_as_such() {
        let calls = Calls::default();
        calls.begin("/x/Probe").answered("OK");
        let open = calls.begin("/x/Probe");
        let text = |calls: &Calls| {
            let mut text = Text::default();
            calls.write(&mut text);
            text.into_string()
        };
        assert!(text(&calls).contains("qsd_csi_rpcs_in_flight{rpc=\"Probe\"} 1"));
        drop(open);
        let text = text(&calls);
        assert!(text.contains("qsd_csi_rpcs_in_flight{rpc=\"Probe\"} 0"), "{text}");
        for code in ["OK", "CANCELLED"] {
            let line = format!("qsd_csi_rpc_seconds_count{{rpc=\"Probe\",code=\"{code}\"}} 1");
            assert!(text.contains(&line), "{text}");
        }
    }
}
