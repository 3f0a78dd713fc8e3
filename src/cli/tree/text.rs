//! Trees of layers in letters: pure, from trees to lines.
//!
//! ```text
//! ├─○ monday          a snapshot
//! │ ├─● restored      branches off from it
//! │ ○ tuesday         the line of the volume that it was of goes on
//! │ ● disk
//! ```

mod line;

pub(super) use line::{Colours, shorten};

use super::forest::{Activity, Damaged, Grove, Kind, Tree};
use crate::cli::output::share;
use line::{Span, Style, count, cut, faint, length, paint, plain};

/// How it is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub(super) letters: &'static Letters,
    pub(super) colours: Colours,
    /// The longest line, if there is a bound.
    pub(super) width: Option<usize>,
}

/// What lines are made of.
#[derive(Debug)]
pub(super) struct Letters {
    /// Where something branches off, and for the last that does.
    branch: &'static str,
    last: &'static str,
    /// What stands below that.
    through: &'static str,
    below_last: &'static str,
    volume: &'static str,
    snapshot: &'static str,
    unnamed: &'static str,
    damaged: &'static str,
    cut: &'static str,
    /// The edges of a bar, and a cell of it from empty to full.
    edges: [&'static str; 2],
    cells: &'static [&'static str],
}

/// Those of every terminal of today.
pub(super) const DRAWN: Letters = Letters {
    branch: "├─",
    last: "╰─",
    through: "│ ",
    below_last: "  ",
    volume: "●",
    snapshot: "○",
    unnamed: "·",
    damaged: "✗",
    cut: "…",
    edges: ["▕", "▏"],
    cells: &[" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█"],
};

/// Those that everything can show.
pub(super) const ASCII: Letters = Letters {
    branch: "|-",
    last: "`-",
    through: "| ",
    below_last: "  ",
    volume: "*",
    snapshot: "o",
    unnamed: ".",
    damaged: "x",
    cut: "~",
    edges: ["[", "]"],
    cells: &[" ", "#"],
};

/// How many cells a bar has.
const CELLS: usize = 10;

/// Space between columns.
const GAP: &str = "  ";

/// The narrowest that labels, and what follows the columns, are made for a narrow terminal.
const NARROWEST: usize = 24;

/// One line.
enum Row {
    /// Without columns.
    Free(Vec<Span>),
    Layer {
        /// What leads to the layer, and its mark.
        stem: Vec<Span>,
        label: Span,
        /// Size, allocated, format.
        cells: [String; 3],
        end: Vec<Span>,
    },
}

/// All pools with their trees, a line each.
pub(super) fn draw(groves: &[Grove], manner: Manner) -> String {
    let mut drawing = Drawing { rows: Vec::new(), letters: manner.letters };
    for grove in groves {
        drawing.grove(grove);
    }
    let widths = Widths::of(&drawing.rows, manner.width);
    let mut lines = vec![heading(&widths, manner.letters)];
    lines.extend(drawing.rows.into_iter().map(|row| widths.line(row, manner.letters)));
    let paint =
        |spans: Vec<Span>| paint(cut(spans, manner.width, manner.letters.cut), manner.colours);
    lines.into_iter().map(paint).collect::<Vec<_>>().join("\n")
}

/// What the marks and the columns mean.
fn heading(widths: &Widths, letters: &'static Letters) -> Vec<Span> {
    let [size, allocated, format] = widths.cells;
    let legend = format!(
        "{} volume{GAP}{} snapshot{GAP}{} layer",
        letters.volume, letters.snapshot, letters.unnamed
    );
    let columns = format!(
        "{GAP}{:>size$}{GAP}{:>allocated$}{GAP}{:format$}",
        HEADER[0], HEADER[1], HEADER[2]
    );
    vec![faint(format!("{legend:width$}", width = widths.tree)), faint(columns)]
}

const HEADER: [&str; 3] = ["SIZE", "ALLOCATED", "FORMAT"];

/// What branches off.
enum Branch<'a> {
    Tree(&'a Tree),
    Damaged(&'a Damaged),
}

/// Whether the line that things branch off from goes on behind them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    GoesOn,
    Ends,
}

/// Lines as they come.
struct Drawing {
    rows: Vec<Row>,
    letters: &'static Letters,
}

impl Drawing {
    fn grove(&mut self, grove: &Grove) {
        self.rows.push(Row::Free(Vec::new()));
        self.rows.push(Row::Free(vec![
            (Style::Strong, format!("pool {}", grove.name)),
            plain(format!("{GAP}{}", grove.directory)),
            faint(format!("{GAP}{}", grove.figures())),
        ]));
        let roots = grove.roots.iter().map(Branch::Tree);
        let damaged = grove.damaged.iter().map(Branch::Damaged);
        self.branches("", roots.chain(damaged).collect(), Line::Ends);
    }

    /// Draws what branches off from a line that `lead` leads to.
    fn branches(&mut self, lead: &str, branches: Vec<Branch<'_>>, line: Line) {
        let count = branches.len();
        let Letters { branch, through, last, below_last, .. } = self.letters;
        for (number, one) in branches.into_iter().enumerate() {
            let is_last = number + 1 == count && line == Line::Ends;
            let (elbow, below) = if is_last { (last, below_last) } else { (branch, through) };
            let stem = format!("{lead}{elbow}");
            match one {
                Branch::Tree(tree) => self.line(&stem, &format!("{lead}{below}"), tree),
                Branch::Damaged(damaged) => self.damaged(stem, damaged),
            }
        }
    }

    fn damaged(&mut self, stem: String, Damaged { what, reason }: &Damaged) {
        self.rows.push(Row::Free(vec![
            faint(stem),
            (Style::Bad, format!("{} {what}", self.letters.damaged)),
            plain(format!("{GAP}damaged: {reason}")),
        ]));
    }

    /// Draws a layer, what branches off from it, and where its line goes on.
    fn line(&mut self, stem: &str, lead: &str, tree: &Tree) {
        let (mut stem, mut tree) = (stem, tree);
        loop {
            self.layer(stem, tree);
            let branches = tree.branches.iter().map(Branch::Tree).collect();
            let Some(next) = &tree.next else {
                return self.branches(lead, branches, Line::Ends);
            };
            self.branches(lead, branches, Line::GoesOn);
            (stem, tree) = (lead, next);
        }
    }

    fn layer(&mut self, stem: &str, tree: &Tree) {
        let (mark, style) = match tree.kind {
            Kind::Volume => (self.letters.volume, Style::Volume),
            Kind::Snapshot => (self.letters.snapshot, Style::Snapshot),
            Kind::Unnamed => (self.letters.unnamed, Style::Faint),
        };
        let end = match &tree.activity {
            None => vec![plain(tree.state.clone())],
            Some(activity) => {
                let words = tree.words(activity.words());
                let bar = bar(activity, self.letters);
                bar.into_iter().chain([(style_of(activity), words)]).collect()
            }
        };
        self.rows.push(Row::Layer {
            stem: vec![faint(stem.to_owned()), (style, format!("{mark} "))],
            label: (style, tree.label.clone()),
            cells: [tree.size.to_string(), tree.allocated.to_string(), tree.format.clone()],
            end,
        });
    }
}

fn style_of(activity: &Activity) -> Style {
    match activity {
        Activity::Job { .. } => Style::Busy,
        Activity::Trouble(_) => Style::Bad,
        Activity::Wait(_) => Style::Faint,
    }
}

fn bar(activity: &Activity, letters: &'static Letters) -> Option<Span> {
    let Activity::Job { done, total, .. } = activity else { return None };
    let steps = letters.cells.len() - 1;
    let filled = share(*done, *total, CELLS * steps);
    let cell = |number: usize| letters.cells[filled.saturating_sub(number * steps).min(steps)];
    let cells: String = (0..CELLS).map(cell).collect();
    let [left, right] = letters.edges;
    Some((Style::Busy, format!("{left}{cells}{right} ")))
}

/// How wide the columns are, in letters.
struct Widths {
    tree: usize,
    cells: [usize; 3],
}

impl Widths {
    fn of(rows: &[Row], bound: Option<usize>) -> Self {
        let mut widths = Self { tree: NARROWEST + 5, cells: HEADER.map(str::len) };
        for row in rows {
            let Row::Layer { stem, label, cells, .. } = row else { continue };
            let tree = length(stem) + count(&label.1);
            widths.tree = widths.tree.max(tree);
            for (width, cell) in widths.cells.iter_mut().zip(cells) {
                *width = (*width).max(count(cell));
            }
        }
        if let Some(bound) = bound {
            let columns = widths.cells.iter().map(|width| width + GAP.len()).sum::<usize>();
            let rest = bound.saturating_sub(columns + NARROWEST);
            widths.tree = widths.tree.min(rest.max(NARROWEST));
        }
        widths
    }

    fn line(&self, row: Row, letters: &'static Letters) -> Vec<Span> {
        let (mut spans, label, cells, end) = match row {
            Row::Free(spans) => return spans,
            Row::Layer { stem, label, cells, end } => (stem, label, cells, end),
        };
        let room = self.tree.saturating_sub(length(&spans));
        let (style, text) = label;
        let text = shorten(&text, room.max(NARROWEST / 3), letters.cut);
        let padding = " ".repeat(room.saturating_sub(count(&text)));
        spans.push((style, text));
        let [size, allocated, format] = self.cells;
        spans.push(plain(format!(
            "{padding}{GAP}{:>size$}{GAP}{:>allocated$}{GAP}{:format$}{GAP}",
            cells[0], cells[1], cells[2]
        )));
        spans.extend(end);
        spans
    }
}

#[cfg(test)]
mod test {
    use super::{super::sample, *};
    use crate::cli::tree::forest::grow;

    const PLAIN: Manner = Manner { letters: &DRAWN, colours: Colours::Off, width: None };

    const WHOLE: &str = "\
● volume  ○ snapshot  · layer  SIZE  ALLOCATED  FORMAT

pool main  /srv/a & b  20Gi in 8 layers, 60Gi of 100Gi free
├─● blank                       1Gi        3Mi  raw     detached
├─· layer ffffffff              1Gi        3Mi  raw
│ ├─● copy                      1Gi        3Mi  qcow2   clone waits, detached
│ ● base                        1Gi        3Mi  qcow2   detached
├─○ monday                      1Gi        3Mi  raw     2026-11-21T17:48:24Z of disk
│ ├─● restored                  1Gi        3Mi  qcow2   ▕█████▎    ▏ clone 53 %, detached
│ ○ tuesday                     1Gi        3Mi  qcow2   2026-11-21T17:48:24Z of disk
│ ● disk                        1Gi        3Mi  qcow2   detached
╰─✗ volume broken  damaged: its record is gone";

    const IN_ASCII: &str = "\
* volume  o snapshot  . layer  SIZE  ALLOCATED  FORMAT

pool main  /srv/a & b  20Gi in 8 layers, 60Gi of 100Gi free
|-* blank                       1Gi        3Mi  raw     detached
|-. layer ffffffff              1Gi        3Mi  raw
| |-* copy                      1Gi        3Mi  qcow2   clone waits, detached
| * base                        1Gi        3Mi  qcow2   detached
|-o monday                      1Gi        3Mi  raw     2026-11-21T17:48:24Z of disk
| |-* restored                  1Gi        3Mi  qcow2   [#####     ] clone 53 %, detached
| o tuesday                     1Gi        3Mi  qcow2   2026-11-21T17:48:24Z of disk
| * disk                        1Gi        3Mi  qcow2   detached
`-x volume broken  damaged: its record is gone";

    const NARROW: &str = "\
● volume  ○ snapshot  · layer  SIZE  ALLOCATED  FORMAT

pool main  /srv/a & b  20Gi in 8 layers, 60Gi of 100Gi free
├─● blank                  1Gi        3Mi  raw     detached
├─· layer ffffffff         1Gi        3Mi  raw
│ ├─● copy                 1Gi        3Mi  qcow2   clone waits, detac…
│ ● base                   1Gi        3Mi  qcow2   detached
├─○ monday                 1Gi        3Mi  raw     2026-11-21T17:48:2…
│ ├─● restored             1Gi        3Mi  qcow2   ▕█████▎    ▏ clone…
│ ○ tuesday                1Gi        3Mi  qcow2   2026-11-21T17:48:2…
│ ● pvc-0b6c5a…f3f7c6a1e   1Gi        3Mi  qcow2   detached
╰─✗ volume broken  damaged: its record is gone";

    fn drawn(manner: Manner) -> String {
        draw(&grow(&sample::things()), manner)
    }

    #[test]
    fn lines_go_on_and_others_branch_off() {
        assert_eq!(drawn(PLAIN), WHOLE);
    }

    #[test]
    fn plain_letters_draw_the_same() {
        let text = drawn(Manner { letters: &ASCII, ..PLAIN });
        assert_eq!(text, IN_ASCII);
    }

    #[test]
    fn a_narrow_terminal_cuts_labels_in_their_middle_and_lines_at_their_end() {
        let mut things = sample::things();
        let name = "pvc-0b6c5ad6-7f0c-4a83-9dd0-5a7f3f7c6a1e";
        things.layers[3].volume_id = name.into();
        things.volumes[4].volume_id = name.into();
        for snapshot in &mut things.snapshots {
            snapshot.source_volume_id = name.into();
        }
        let text = draw(&grow(&things), Manner { width: Some(70), ..PLAIN });
        assert!(text.lines().all(|line| count(line) <= 70), "{text}");
        assert_eq!(text, NARROW);
    }

    #[test]
    fn colours_are_for_terminals() {
        let text = drawn(Manner { colours: Colours::On, ..PLAIN });
        assert!(text.contains("\x1b[1;32mdisk\x1b[0m"), "{text}");
        assert!(!drawn(PLAIN).contains('\x1b'));
    }
}
