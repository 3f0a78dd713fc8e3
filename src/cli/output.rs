//! What people and scripts read: tables, or JSON.

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
    fn arguments_are_quoted_where_a_shell_would_take_them_apart() {
        assert_eq!(quoted("id=a,path=/b"), "id=a,path=/b");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
