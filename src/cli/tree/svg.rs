//! Trees of layers as a picture: pure, from trees to SVG that needs nothing else.
//!
//! Time goes from left to right, as `layout` has it.

mod canvas;
mod layout;

use super::{
    forest::{Activity, Grove, Kind, Tree},
    text::shorten,
};
use crate::cli::output::share;
use canvas::{Area, Canvas};
use layout::{Layout, Spot, depth};

/// Around everything, and within a pool.
const MARGIN: usize = 24;

/// From the top of a pool to its first layer.
const HEAD: usize = 76;

/// The height of a layer, and what is between two.
const LAYER: usize = 80;
const BELOW: usize = 16;
const BESIDE: usize = 48;

/// How wide layers may be.
const WIDTHS: [usize; 2] = [216, 376];

/// The least number of columns.
const COLUMNS: usize = 3;

/// The widths of a letter: all text is in fonts whose letters are equally wide.
const LETTER: usize = 8;
const SMALL_LETTER: usize = 7;

/// From the edge of a layer to what is in it.
const INSET: usize = 12;

/// The radius of a bend.
const BEND: usize = 10;

/// The height of the title, and of a line of text below the layers of a pool.
const TITLE: usize = 56;
const LINE: usize = 20;

/// The colours and fonts.
const STYLE: &str = "
text { font-family: 'DejaVu Sans Mono', ui-monospace, Menlo, Consolas, monospace; font-size: 11px; fill: #475569; }
.page { fill: #ffffff; }
.title { font-size: 16px; font-weight: bold; fill: #0f172a; }
.pool { fill: #f8fafc; stroke: #cbd5e1; }
.pool-name { font-size: 14px; font-weight: bold; fill: #0f172a; }
.layer { stroke-width: 1.5; }
.layer.volume { fill: #eff6ff; stroke: #60a5fa; }
.layer.snapshot { fill: #fffbeb; stroke: #fbbf24; }
.layer.unnamed { fill: #ffffff; stroke: #94a3b8; stroke-dasharray: 5 3; }
.label.volume { fill: #1d4ed8; }
.label.snapshot { fill: #b45309; }
.label.unnamed { fill: #64748b; }
.name { font-size: 13px; font-weight: bold; fill: #ffffff; }
.edge { fill: none; stroke: #94a3b8; stroke-width: 1.5; }
.track { fill: #e2e8f0; }
.done { fill: #16a34a; }
.used { fill: #94a3b8; }
.own { fill: #1d4ed8; }
.busy { fill: #15803d; }
.bad { fill: #b91c1c; }
";

/// The picture of all pools, as they were at that moment.
pub(super) fn draw(groves: &[Grove], moment: &str) -> String {
    let mut canvas = Canvas::default();
    let grid = Grid::of(groves);
    let width = grid.columns * grid.pitch() - BESIDE + 2 * MARGIN;
    draw_title(&mut canvas, moment, width + MARGIN);
    let mut y = MARGIN + TITLE;
    for grove in groves {
        let layout = Layout::of(&grove.roots, grid.columns);
        let layers = layout.rows() * (LAYER + BELOW);
        let height = HEAD + layers + grove.damaged.len() * LINE + BELOW;
        let area = Area { x: MARGIN, y, width, height };
        canvas.rect("pool", area, 12);
        draw_head(&mut canvas, grove, area);
        for placed in &layout.placed {
            draw_edge(&mut canvas, grid.at(area, placed.at), placed.on.map(|on| grid.at(area, on)));
            draw_layer(&mut canvas, placed.tree, grid.at(area, placed.at));
        }
        draw_damaged(&mut canvas, grove, y + HEAD + layers);
        y += height + MARGIN;
    }
    canvas.finish(width + 2 * MARGIN, y, STYLE)
}

/// Where layers can be.
#[derive(Clone, Copy)]
struct Grid {
    /// How wide a layer is.
    width: usize,
    columns: usize,
}

impl Grid {
    /// Of layers so wide that what they say has room, and of as many columns as the longest line.
    fn of(groves: &[Grove]) -> Self {
        let roots = || groves.iter().flat_map(|grove| &grove.roots);
        let [least, most] = WIDTHS;
        let width = roots().map(needed_width).max().unwrap_or(least).clamp(least, most);
        let columns = roots().map(depth).max().unwrap_or_default().max(COLUMNS);
        Self { width, columns }
    }

    /// From one column to the next.
    fn pitch(self) -> usize {
        self.width + BESIDE
    }

    /// The place of a layer in a pool.
    fn at(self, pool: Area, spot: Spot) -> Area {
        let x = pool.x + MARGIN + spot.column * self.pitch();
        let y = pool.y + HEAD + spot.row * (LAYER + BELOW);
        Area { x, y, width: self.width, height: LAYER }
    }
}

fn draw_title(canvas: &mut Canvas, moment: &str, right: usize) {
    canvas.text("title", MARGIN, MARGIN + 16, "Volumes, snapshots and their layers");
    canvas.text("", MARGIN, MARGIN + 36, moment);
    let mut x = right;
    for (kind, name) in
        [(Kind::Unnamed, "layer"), (Kind::Snapshot, "snapshot"), (Kind::Volume, "volume")]
    {
        x = x.saturating_sub(label_width(name) + INSET);
        draw_label(canvas, kind, name, x + INSET, MARGIN);
    }
}

fn draw_head(canvas: &mut Canvas, grove: &Grove, pool: Area) {
    let (left, top) = (pool.x + MARGIN, pool.y + MARGIN);
    canvas.text("pool-name", left, top + 8, &format!("pool {}", grove.name));
    let directory = left + (grove.name.chars().count() + 7) * LETTER + INSET;
    canvas.text("", directory, top + 8, &grove.directory);
    canvas.text("", left + GAUGE + INSET, top + 27, &grove.figures());
    draw_gauge(canvas, grove, Area { x: left, y: top + 20, width: GAUGE, height: 8 });
}

fn draw_damaged(canvas: &mut Canvas, grove: &Grove, top: usize) {
    for (number, damaged) in grove.damaged.iter().enumerate() {
        let text = format!("{} is damaged: {}", damaged.what, damaged.reason);
        canvas.text("bad", 2 * MARGIN, top + number * LINE + 12, &text);
    }
}

/// How long the gauge of a pool is.
const GAUGE: usize = 192;

/// What the pool spends, and what others have of its file system.
fn draw_gauge(canvas: &mut Canvas, grove: &Grove, area: Area) {
    if !grove.trouble.is_empty() {
        return;
    }
    let used = grove.total.saturating_sub(grove.free).max(grove.allocated);
    canvas.rect("track", area, 4);
    canvas.rect("used", Area { width: share(used, grove.total, area.width), ..area }, 4);
    canvas.rect("own", Area { width: share(grove.allocated, grove.total, area.width), ..area }, 4);
}

/// An edge to a layer from the one that it stands on, which is in the column before.
fn draw_edge(canvas: &mut Canvas, to: Area, from: Option<Area>) {
    let Some(from) = from else { return };
    let (left, right) = (from.x + from.width, to.x);
    let (start, end) = (from.y + from.height / 2, to.y + to.height / 2);
    if start == end {
        return canvas.path("edge", format_args!("M{left} {start}H{right}"));
    }
    let trunk = left + BESIDE / 2;
    let (before, after) = (trunk - BEND, trunk + BEND);
    let (down, up) = (start + BEND, end - BEND);
    canvas.path(
        "edge",
        format_args!(
            "M{left} {start}H{before}Q{trunk} {start} {trunk} {down}V{up}Q{trunk} {end} {after} {end}H{right}"
        ),
    );
}

fn draw_layer(canvas: &mut Canvas, tree: &Tree, area: Area) {
    let Area { x, y, width, .. } = area;
    let left = x + INSET;
    let letters = (width - 2 * INSET) / SMALL_LETTER;
    let figures = figures(tree);
    canvas.open(&format!("{}\n{figures}\n{}", tree.label, tree.state));
    canvas.rect(&format!("layer {}", class(tree.kind)), area, 10);
    let name = shorten(&tree.label, (width - 4 * INSET) / LETTER, "…");
    draw_label(canvas, tree.kind, &name, left, y + 10);
    canvas.text("", left, y + 47, &clip(&figures, letters));
    let (class, words) = words(tree);
    canvas.text(class, left, y + 62, &clip(&words, letters));
    if let Some(Activity::Job { done, total, .. }) = tree.activity {
        let track = Area { x: left, y: y + 69, width: width - 2 * INSET, height: 5 };
        canvas.rect("track", track, 2);
        canvas.rect("done", Area { width: share(done, total, track.width), ..track }, 2);
    }
    canvas.close();
}

fn figures(tree: &Tree) -> String {
    format!("{} of {} · {}", tree.allocated, tree.size, tree.format)
}

/// What is told of a layer in its last line.
fn words(tree: &Tree) -> (&'static str, String) {
    match &tree.activity {
        Some(activity) if activity.is_trouble() => ("bad", activity.words().to_owned()),
        Some(activity) => ("busy", tree.words(activity.words())),
        None => ("", tree.state.clone()),
    }
}

fn draw_label(canvas: &mut Canvas, kind: Kind, name: &str, x: usize, y: usize) {
    let area = Area { x, y, width: label_width(name), height: 22 };
    canvas.rect(&format!("label {}", class(kind)), area, 11);
    canvas.text("name", x + INSET, y + 16, name);
}

fn label_width(name: &str) -> usize {
    name.chars().count() * LETTER + 2 * INSET
}

fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Volume => "volume",
        Kind::Snapshot => "snapshot",
        Kind::Unnamed => "unnamed",
    }
}

/// The text, without its end where that is needed to fit.
fn clip(text: &str, room: usize) -> String {
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room.saturating_sub(1)).chain(['…']).collect()
}

fn needed_width(tree: &Tree) -> usize {
    let label = label_width(&tree.label) + 2 * INSET;
    let lines = [figures(tree), words(tree).1].map(|line| line.chars().count());
    let lines = lines.map(|letters| letters * SMALL_LETTER + 2 * INSET);
    let above = tree.children().map(needed_width).max().unwrap_or_default();
    label.max(lines[0]).max(lines[1]).max(above)
}

#[cfg(test)]
mod test {
    use super::{super::sample, *};
    use crate::cli::tree::forest::grow;

    /// The areas of what has this class.
    fn areas(picture: &str, class: &str) -> Vec<[usize; 4]> {
        let begin = format!("<rect class=\"{class}");
        let own = picture.lines().filter(|line| line.starts_with(&begin));
        let number = |line: &str, name: &str| {
            let rest = line.split_once(&format!(" {name}=\"")).unwrap().1;
            rest.split('"').next().unwrap().parse().unwrap()
        };
        own.map(|line| ["x", "y", "width", "height"].map(|name| number(line, name))).collect()
    }

    #[test]
    fn every_layer_has_a_place_of_its_own_within_its_pool() {
        let picture = draw(&grow(&sample::things()), "now");
        let layers = areas(&picture, "layer ");
        assert_eq!(layers.len(), 8);
        let [left, top, width, height] = areas(&picture, "pool")[0];
        for (number, [x, y, wide, high]) in layers.iter().copied().enumerate() {
            assert!(x > left && x + wide < left + width, "{picture}");
            assert!(y > top && y + high < top + height, "{picture}");
            let apart = |[a, b, c, d]: &[usize; 4]| {
                a + c < x || x + wide < *a || b + d < y || y + high < *b
            };
            assert!(layers[..number].iter().all(apart), "{picture}");
        }
    }

    #[test]
    fn a_picture_tells_names_sizes_and_jobs_and_needs_nothing_else() {
        let picture = draw(&grow(&sample::things()), "now");
        for words in ["monday</text>", "/srv/a &amp; b</text>", "3Mi of 1Gi · qcow2", "clone 53 %"]
        {
            assert!(picture.contains(words), "{words}: {picture}");
        }
        assert!(picture.contains("volume broken is damaged: its record is gone"));
        assert_eq!(areas(&picture, "done").len(), 1);
        assert_eq!(picture.matches("<path").count(), 5, "an edge to each layer but the roots");
        assert_eq!(picture.matches("http").count(), 1, "the name space");
    }

    #[test]
    fn nothing_at_all_is_a_picture_too() {
        assert!(draw(&[], "now").ends_with("</svg>\n"));
    }
}
