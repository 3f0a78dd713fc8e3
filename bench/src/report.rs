//! The report: said on standard output as it grows, and written as Markdown with its plots.

use crate::{plot::Chart, say::say};
use anyhow::Context as _;
use std::{
    fmt::Write as _,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
};

pub(crate) struct Report {
    dir: PathBuf,
    markdown: String,
}

/// A table with a head.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<const N: usize>(head: [&str; N]) -> Self {
        Self { rows: vec![head.map(str::to_owned).into()] }
    }

    /// Adds a row with as many cells as the head.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(Some(N), self.rows.first().map(Vec::len), "cells of a row");
        self.rows.push(cells.into());
    }

    /// As Markdown, padded so that it reads well as it is.
    fn markdown(&self) -> String {
        let columns = self.rows.first().map_or(0, Vec::len);
        let width = |column: usize| {
            let widths = self.rows.iter().filter_map(|row| Some(row.get(column)?.chars().count()));
            widths.max().unwrap_or_default().max(3)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (number, row) in self.rows.iter().enumerate() {
            for (cell, width) in row.iter().zip(&widths) {
                _ = write!(text, "| {cell:width$} ");
            }
            text.push_str("|\n");
            if number == 0 {
                for width in &widths {
                    _ = write!(text, "|{}", "-".repeat(width + 2));
                }
                text.push_str("|\n");
            }
        }
        text
    }
}

impl Report {
    /// A report that will be written to `dir`.
    pub(crate) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), markdown: String::new() }
    }

    /// The directory it is written to.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn heading(&mut self, text: &str) {
        let level = if self.markdown.is_empty() { "#" } else { "##" };
        self.add(&format!("{level} {text}"));
    }

    pub(crate) fn text(&mut self, text: impl AsRef<str>) {
        self.add(text.as_ref());
    }

    pub(crate) fn table(&mut self, table: &Table) {
        self.add(table.markdown().trim_end());
    }

    /// Draws a chart into a file beside the report.
    pub(crate) fn figure(&mut self, file: &str, what: &str, chart: &Chart) -> anyhow::Result<()> {
        self.create(file, &chart.svg())?;
        self.add(&format!("![{what}]({file})"));
        Ok(())
    }

    /// Writes the report; where to.
    pub(crate) fn write(&self) -> anyhow::Result<PathBuf> {
        self.create("report.md", &self.markdown)
    }

    fn add(&mut self, block: &str) {
        say(format!("\n{block}"));
        if !self.markdown.is_empty() {
            self.markdown.push('\n');
        }
        self.markdown.push_str(block);
        self.markdown.push('\n');
    }

    fn create(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.dir.join(name);
        let mut file = File::create(&path).with_context(|| path.display().to_string())?;
        file.write_all(text.as_bytes())?;
        Ok(path)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_table_is_padded_to_its_widest_cells() {
        let mut table = Table::new(["call", "ms"]);
        table.row(["CreateVolume".to_owned(), "7.1".to_owned()]);
        let expected = "| call         | ms  |\n|--------------|-----|\n| CreateVolume | 7.1 |\n";
        assert_eq!(table.markdown(), expected);
    }
}
