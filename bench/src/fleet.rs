//! Volumes that are there: created, staged, published, and idle.

use crate::{driver::Driver, graph::Cache, say::say, scratch::Paths};

/// Bytes of a volume. Nothing is written to it, so it takes no space.
pub(crate) const SIZE: u64 = 64 << 20;

/// The volumes, by id.
#[derive(Default)]
pub(crate) struct Fleet(Vec<String>);

impl Fleet {
    /// Adds volumes until there are `count`.
    pub(crate) async fn grow(&mut self, driver: &mut Driver, count: usize) -> anyhow::Result<()> {
        say(format!("publishing volumes until there are {count} ..."));
        while self.0.len() < count {
            let volume = format!("idle-{:04}", self.0.len());
            let paths = driver.scratch.paths(&volume)?;
            driver.client.create(&volume, SIZE, Cache::Writeback).await?;
            driver.client.attach(&volume, &paths).await?;
            self.0.push(volume);
        }
        Ok(())
    }

    /// Their ids.
    pub(crate) fn names(&self) -> &[String] {
        &self.0
    }

    /// Where they are staged and published.
    pub(crate) fn paths(&self, driver: &Driver) -> anyhow::Result<Vec<Paths>> {
        self.0.iter().map(|volume| driver.scratch.paths(volume)).collect()
    }

    /// Takes all of them away.
    pub(crate) async fn clear(&mut self, driver: &mut Driver) -> anyhow::Result<()> {
        say(format!("deleting {} volumes ...", self.0.len()));
        for volume in self.0.drain(..) {
            let paths = driver.scratch.paths(&volume)?;
            driver.client.detach(&volume, &paths).await?;
            driver.client.delete(&volume).await?;
        }
        Ok(())
    }
}
