//! The exports of those who read a volume beside others: one each, which come and go.

use super::{
    Command, Daemon,
    graph::{self, Reader},
    monitor::Error,
};
use serde_json::json;

impl Daemon {
    /// Sees to it that these readers have an export each, and no others. One whose socket is gone is
    /// opened anew.
    pub async fn set_readers(&self, readers: &[Reader]) -> Result<(), Error> {
        let exports = self.execute(Command::new("query-block-exports", json!({}))).await?;
        let ids = exports.as_array().into_iter().flatten().filter_map(|one| one["id"].as_str());
        let there: Vec<_> = ids.filter(|id| id.starts_with(Reader::EXPORT)).collect();
        let is_served =
            |id: &str| readers.iter().any(|reader| reader.export() == id && reader.socket.exists());
        let (there, old): (Vec<_>, Vec<_>) = there.into_iter().partition(|id| is_served(id));
        for id in old {
            self.end_export(id).await?;
        }
        for reader in readers {
            if !there.contains(&reader.export().as_str()) {
                self.execute(graph::reader_export(reader)).await?;
            }
        }
        Ok(())
    }
}
