//! What people and scripts read: tables, or JSON.

use crate::{csi::pb::inspect, units::Bytes};
use comfy_table::{ContentArrangement, Table};
use serde::Serialize;
use std::io::{self, Write as _};

/// How a command answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Output {
    /// For people
    Table,
    /// For scripts: one JSON value, sizes in bytes
    Json,
}

/// A table with these columns.
pub(super) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_style(comfy_table::presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.add_rows(rows);
    let lines: Vec<_> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n")
}

/// Says something, with a line end.
pub(super) fn say(text: &str) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{text}")?;
    Ok(())
}

/// Says a value as JSON.
pub(super) fn say_json<T: Serialize>(value: &T) -> anyhow::Result<()> {
    say(&serde_json::to_string_pretty(value)?)
}

/// Says what became of a volume or snapshot.
pub(super) fn say_done(output: Output, kind: &str, id: &str, what: &str) -> anyhow::Result<()> {
    match output {
        Output::Json => say_json(&serde_json::json!({ format!("{kind}_id"): id, "outcome": what })),
        Output::Table => say(&format!("{kind} {id} is {what}")),
    }
}

/// Says what is known of one thing, a line each.
pub(super) fn say_rows(rows: &[(&str, String)]) -> anyhow::Result<()> {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let line = |(name, value): &(&str, String)| format!("{name:width$}  {value}");
    say(&rows.iter().map(line).collect::<Vec<_>>().join("\n"))
}

/// A size as the driver tells it.
pub(super) fn bytes(count: i64) -> Bytes {
    Bytes::try_from(count).unwrap_or_default()
}

/// The same for people.
pub(super) fn size(count: i64) -> String {
    bytes(count).to_string()
}

/// What the pool spends on the layers of something, and how much of that on layers that nothing
/// else needs.
pub(super) fn spent(own: i64, all: i64) -> String {
    match bytes(all).saturating_sub(bytes(own)) {
        Bytes::ZERO => size(all),
        shared => format!("{}, and {shared} shared with others", size(own)),
    }
}

/// Where a layer lies and what there is to know of it, in one line.
pub(super) fn layer(layer: &inspect::Layer) -> String {
    let inspect::Layer { path, format, .. } = layer;
    let mut words = vec![format!("{path}  {format}, {}", size(layer.allocated_bytes))];
    words.extend(layer.snapshot_ids.iter().map(|id| format!("snapshot {id}")));
    words.extend(activity(layer));
    words.join(", ")
}

/// What is done with a layer, in a few words; nothing if nothing is to be done.
pub(super) fn activity(layer: &inspect::Layer) -> Option<String> {
    match &layer.job {
        Some(job) => Some(format!("{} {}", job.kind, percent(job.done_bytes, job.total_bytes))),
        None if !layer.trouble.is_empty() => Some(format!("failed: {}", layer.trouble)),
        None => layer.detaching.then(|| "clone waits".to_owned()),
    }
}

/// How much of all is done; nothing at the beginning.
pub(super) fn percent(done: i64, total: i64) -> String {
    format!("{} %", share(bytes(done), bytes(total), 100))
}

/// How many of `steps` stand for what is done of all.
pub(super) fn share(done: Bytes, all: Bytes, steps: usize) -> usize {
    let whole = u128::from(all.count()).max(1);
    let done = u128::from(done.count()).min(whole);
    let wide = u128::try_from(steps).unwrap_or_default();
    usize::try_from(done.saturating_mul(wide) / whole).unwrap_or(steps)
}

/// Quotes an argument for a shell, where it needs that.
pub(super) fn quoted(argument: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./,=:+@%".contains(&byte);
    if !argument.is_empty() && argument.bytes().all(plain) {
        return argument.to_owned();
    }
    format!("'{}'", argument.replace('\'', r"'\''"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_table_has_no_spaces_at_its_right_edge() {
        let text =
            table(&["A", "LONG"], [vec!["1".into(), "2".into()], vec![String::new(), "3".into()]]);
        assert_eq!(text, "A  LONG\n1  2\n   3");
    }

    #[test]
    fn a_share_is_never_more_than_all() {
        let all = Bytes::new(u64::MAX);
        for (done, total, steps) in
            [(Bytes::ZERO, Bytes::ZERO, 0), (all, all, 100), (all, Bytes::new(3), 100)]
        {
            assert_eq!(share(done, total, 100), steps);
        }
        assert_eq!(percent(0, 0), "0 %");
        assert_eq!(percent(199, 200), "99 %");
    }

    #[test]
    fn arguments_are_quoted_where_a_shell_would_take_them_apart() {
        assert_eq!(quoted("id=a,path=/b"), "id=a,path=/b");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
