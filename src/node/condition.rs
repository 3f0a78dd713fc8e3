//! The condition of a volume: what is wrong with it now, in words that a person understands.
//!
//! The one source for CSI's `VolumeCondition` and for what people are told of an attachment.
//! Nothing is asked that could hang: `/sys`, the table of mounts, and what the driver knows.

use super::{
    Attached, Death, Form, HostPath, Node, Relayed, Service,
    attachment::Attachment,
    device::LoopDevice,
    health::troubles_of,
    host::LOOP_MAJOR,
    image::{CONTESTED, Image},
};
use crate::{
    blocking::blocking,
    chain::Chain,
    pool::Space,
    run::VolumeDir,
    volume::{Entry, PoolName, VolumeId},
};
use std::{collections::BTreeMap, path::Path};

/// Of this many parts of a pool the last one counts as nothing.
const PARTS: u64 = 64;

/// A request that waits longer has no daemon or master that answers, in milliseconds. The relay asks
/// a daemon after 3 s whether it lives, and gives it 5 s.
const PATIENCE: u64 = 10_000;

/// The condition of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition(Vec<String>);

impl Condition {
    /// Whether something is wrong.
    pub fn is_abnormal(&self) -> bool {
        !self.0.is_empty()
    }
}

impl std::fmt::Display for Condition {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return out.write_str("all is well");
        }
        out.write_str(&self.0.join("; "))
    }
}

impl Node {
    /// The conditions of volumes, in their order, with what the relay has to tell.
    pub async fn conditions(&self, ids: Vec<VolumeId>) -> Vec<Condition> {
        let (pools, relayed) = tokio::join!(self.pools(), self.relayed_in_time());
        let relayed = relayed.flatten().unwrap_or_default();
        let (node, troubles) = (self.clone(), troubles_of(&pools));
        let of_each = move || {
            let condition = |id| node.condition_in(id, &relayed, &troubles);
            ids.iter().map(condition).collect()
        };
        blocking(of_each).await
    }

    /// The condition of a volume, with what is wrong with the pools.
    pub(super) fn condition_in(
        &self,
        id: &VolumeId,
        relayed: &Relayed,
        pools: &BTreeMap<PoolName, String>,
    ) -> Condition {
        let pool = match self.volumes.entry(id) {
            Ok(Entry::Volume(volume)) => volume.pool().clone(),
            Ok(Entry::Damaged { reason, .. }) => {
                return Condition(vec![format!("it is damaged: {reason}")]);
            }
            Err(error) => return Condition(vec![Chain(&error).to_string()]),
        };
        let mut troubles = Vec::new();
        if let Some(attachment) = self.attachment(id) {
            if let Err(reason) = attachment.daemon {
                troubles.push(format!("no daemon serves it, which is tried again: {reason}"));
                let other = attachment.last_death.filter(|death| death.how != reason);
                troubles.extend(other.map(|Death { how, times, .. }| {
                    format!("daemons died {times} times, the last one so: {how}")
                }));
            }
            troubles.extend(Some(attachment.warning).filter(|warning| !warning.is_empty()));
        }
        let front_end = relayed.get(&id.run_key()).and_then(|one| one.front_end.as_ref());
        if let Some(front) = front_end.filter(|front| front.oldest_ms >= PATIENCE) {
            let seconds = front.oldest_ms / 1000;
            troubles.push(format!("a request of its VM has had no answer for {seconds} s"));
        }
        troubles.extend(pools.get(&pool).cloned());
        Condition(troubles)
    }

    /// What is not as it should be with a volume though a daemon serves it.
    pub(super) fn warnings(&self, attached: &Attached) -> String {
        let Service::Up(daemon) = &attached.service else { return String::new() };
        let dir = self.dir(&attached.attachment.volume);
        let mut warnings = Vec::from_iter(ended_below(&dir, &attached.attachment));
        if attached.attachment.form.is_relayed() {
            let tried = self.warning(daemon);
            warnings.extend(Some(tried).filter(|warning| !warning.is_empty()));
            if attached.image == Image::Contested {
                warnings.push(CONTESTED.to_owned());
            }
        }
        warnings.join("; ")
    }
}

/// What a pod has that ended with a daemon, or was given up by the kernel.
pub(super) fn ended_below(dir: &VolumeDir, attachment: &Attachment) -> Option<String> {
    let disk = dir.disks().pop()?;
    let is_alive = |number: (u32, u32)| is_over(number, &disk);
    let targets = attachment.targets.iter().cloned().map(HostPath::noted);
    match &attachment.form {
        Form::VhostUser => None,
        Form::Block => {
            let dead = targets.filter_map(|at| at.shown_device()).any(|number| !is_alive(number));
            dead.then(|| ended("block device"))
        }
        Form::Filesystem { .. } => {
            let staged = HostPath::noted(attachment.staging_path.clone());
            let all = targets.chain([staged]);
            let mounts: Vec<_> = all.filter_map(|at| at.mounted().ok().flatten()).collect();
            if mounts.iter().any(|mounted| !is_alive(mounted.device)) {
                return Some(ended("file system"));
            }
            let is_given_up = |mounted: &super::host::Mounted| mounted.is_given_up;
            mounts.iter().any(is_given_up).then(|| {
                "its file system takes no more writes since one of them failed; start its \
                 pods anew"
                    .to_owned()
            })
        }
    }
}

fn ended(what: &str) -> String {
    format!("its {what} ended with the daemon that served it; start its pods anew")
}

fn is_over((major, minor): (u32, u32), disk: &Path) -> bool {
    major == LOOP_MAJOR && LoopDevice::is_over(minor, disk)
}

pub(super) fn is_full(space: Space) -> bool {
    space.free.count() < space.total.count() / PARTS
}

pub(super) fn full(pool: &PoolName, space: Space) -> String {
    let Space { total, free } = space;
    format!("pool {pool} is full: {free} of {total} are free, and writes fail")
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::units::Bytes;

    #[test]
    fn a_condition_says_all_that_is_wrong() {
        let well = Condition(Vec::new());
        assert!(!well.is_abnormal());
        assert_eq!(well.to_string(), "all is well");
        let ill = Condition(vec!["one".to_owned(), "two".to_owned()]);
        assert!(ill.is_abnormal());
        assert_eq!(ill.to_string(), "one; two");
    }

    #[test]
    fn the_last_of_a_pool_counts_as_nothing() {
        let space = |free| Space { total: Bytes::gib(64), free: Bytes::new(free) };
        assert!(is_full(space(0)) && is_full(space((1 << 30) - 1)));
        assert!(!is_full(space(1 << 30)));
    }
}
