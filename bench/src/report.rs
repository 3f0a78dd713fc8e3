//! The report in `target/bench/`: a table, and bars as SVG.

use std::{
    fmt::Write as _,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
};

/// One figure.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) note: String,
}

/// A group of bars with one unit.
#[derive(Clone, Debug)]
pub(crate) struct Plot {
    pub(crate) file: &'static str,
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    /// Each bar: what it is, and how long.
    pub(crate) bars: Vec<(String, f64)>,
    /// A line to reach.
    pub(crate) mark: Option<f64>,
}

/// Writes `report.md` and the plots; the path of the report.
pub(crate) fn write(
    dir: &Path,
    about: &str,
    rows: &[Row],
    plots: &[Plot],
) -> anyhow::Result<PathBuf> {
    let mut text = format!("# qsd-csi bench\n\n{about}\n\n| figure | value | |\n|---|---:|---|\n");
    for row in rows {
        let Row { name, value, unit, note } = row;
        writeln!(text, "| {name} | {value:.2} {unit} | {note} |")?;
    }
    for plot in plots {
        writeln!(text, "\n![{}]({})", plot.title, plot.file)?;
        File::create(dir.join(plot.file))?.write_all(svg(plot).as_bytes())?;
    }
    let path = dir.join("report.md");
    File::create(&path)?.write_all(text.as_bytes())?;
    Ok(path)
}

const ROW: f64 = 26.0;
const LABELS: f64 = 330.0;
const BARS: f64 = 400.0;
const TOP: f64 = 46.0;

/// Horizontal bars, each with its value at its end.
fn svg(plot: &Plot) -> String {
    let most = plot.bars.iter().map(|(_, value)| *value).chain(plot.mark).fold(0.0, f64::max);
    let scale = if most > 0.0 { BARS / most } else { 0.0 };
    let mut rows = String::new();
    let mut y = TOP;
    for (label, value) in &plot.bars {
        let (length, middle) = (value * scale, y + ROW * 0.62);
        _ = writeln!(
            rows,
            "<text x=\"{:.0}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LABELS:.0}\" y=\"{:.1}\" width=\"{length:.1}\" height=\"{:.1}\" \
             fill=\"#4878a8\"/><text x=\"{:.1}\" y=\"{middle:.1}\">{value:.2}</text>",
            LABELS - 8.0,
            escaped(label),
            y + ROW * 0.15,
            ROW * 0.7,
            LABELS + length + 6.0,
        );
        y += ROW;
    }
    if let Some(mark) = plot.mark {
        let x = LABELS + mark * scale;
        _ = writeln!(
            rows,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP:.0}\" y2=\"{y:.1}\" stroke=\"#b03030\" \
             stroke-dasharray=\"4 3\"/>"
        );
    }
    let (width, height) = (LABELS + BARS + 80.0, y + 14.0);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n<text x=\"14\" y=\"26\" font-size=\"16\">{} ({})</text>\n{rows}</svg>\n",
        escaped(plot.title),
        plot.unit
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod test {
    use super::*;

    fn plot() -> Plot {
        let bars = vec![("a < b".to_owned(), 1.0), ("c".to_owned(), 2.0)];
        Plot { file: "p.svg", title: "T", unit: "x", bars, mark: Some(1.5) }
    }

    #[test]
    fn the_longest_bar_has_the_full_length_and_labels_are_escaped() {
        let svg = svg(&plot());
        assert!(svg.contains("a &lt; b"));
        assert!(svg.contains("width=\"400.0\"") && svg.contains("width=\"200.0\""));
        assert!(svg.contains("<line x1=\"630.0\""));
    }

    #[test]
    fn a_report_names_its_plots() {
        let dir = tempfile::tempdir().unwrap();
        let row = Row { name: "n".into(), value: 1.0, unit: "ms", note: "note".into() };
        let path = write(dir.path(), "about", &[row], &[plot()]).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("| n | 1.00 ms | note |") && text.contains("![T](p.svg)"));
        assert!(dir.path().join("p.svg").exists());
    }
}
