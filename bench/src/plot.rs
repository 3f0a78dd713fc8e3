//! Groups of bars as SVG. Pure; a library would bring more than it saves.

use std::fmt::Write as _;

/// Groups of bars beside each other, with one colour for the bars of the same place in a group.
pub(crate) struct Chart {
    pub(crate) title: String,
    /// Of the values.
    pub(crate) unit: &'static str,
    pub(crate) groups: Vec<Group>,
    /// A value to draw a line at.
    pub(crate) goal: Option<f64>,
}

pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) bars: Vec<Bar>,
}

pub(crate) struct Bar {
    /// The same in each group.
    pub(crate) name: String,
    pub(crate) value: f64,
    /// Where a thin line above the bar ends.
    pub(crate) upto: Option<f64>,
}

/// Distinct also for those who see no red or green.
const COLOURS: [&str; 4] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"];

/// Pixels.
const HEIGHT: f64 = 260.0;
const BAR: f64 = 34.0;
const GAP: f64 = 40.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 70.0;

impl Chart {
    pub(crate) fn svg(&self) -> String {
        let (top, places) = (self.top(), self.places());
        let group = width(places) + GAP;
        let right = LEFT + group * count(self.groups.len()) + GAP;
        let bottom = TOP + HEIGHT;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{right:.0}\" height=\"{:.0}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
            bottom + 60.0
        );
        text(&mut svg, (LEFT, 22.0), "start", &self.title);
        self.legend(&mut svg);
        self.scale(&mut svg, top, right);
        for (number, one) in self.groups.iter().enumerate() {
            let x = LEFT + GAP / 2.0 + group * count(number);
            for (place, bar) in one.bars.iter().enumerate() {
                draw(&mut svg, bar, x + BAR * count(place), place, top);
            }
            // Long names take two lines.
            let (first, second) = one.name.split_once(", ").unwrap_or((&one.name, ""));
            text(&mut svg, (x + width(places) / 2.0, bottom + 20.0), "middle", first);
            text(&mut svg, (x + width(places) / 2.0, bottom + 36.0), "middle", second);
        }
        if let Some(goal) = self.goal {
            line(&mut svg, (LEFT, y(goal, top)), (right, y(goal, top)), "#d55e00");
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// The value at the upper end of the scale.
    fn top(&self) -> f64 {
        let bars = self.groups.iter().flat_map(|group| &group.bars);
        let values = bars.map(|bar| bar.upto.unwrap_or(bar.value)).chain(self.goal);
        round(values.fold(0.0, f64::max) * 1.05)
    }

    /// How many bars the largest group has, at least so many that names have room.
    fn places(&self) -> usize {
        self.groups.iter().map(|group| group.bars.len()).max().unwrap_or_default().max(4)
    }

    fn legend(&self, svg: &mut String) {
        let bars = self.groups.first().map(|group| group.bars.as_slice()).unwrap_or_default();
        for (place, bar) in bars.iter().enumerate() {
            let x = LEFT + 180.0 * count(place);
            let colour = COLOURS[place % COLOURS.len()];
            _ = writeln!(
                svg,
                "<rect x=\"{x:.0}\" y=\"36\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
            );
            text(svg, (x + 18.0, 47.0), "start", &bar.name);
        }
    }

    fn scale(&self, svg: &mut String, top: f64, right: f64) {
        for step in 0..=4 {
            let value = top * f64::from(step) / 4.0;
            line(svg, (LEFT, y(value, top)), (right, y(value, top)), "#dddddd");
            let label = format!("{value:.2}");
            let label = label.trim_end_matches('0').trim_end_matches('.');
            text(svg, (LEFT - 6.0, y(value, top) + 4.0), "end", label);
        }
        text(svg, (LEFT - 6.0, TOP - 12.0), "end", self.unit);
    }
}

fn draw(svg: &mut String, bar: &Bar, x: f64, place: usize, top: f64) {
    let (colour, start) = (COLOURS[place % COLOURS.len()], y(bar.value, top));
    let (wide, high) = (BAR - 4.0, TOP + HEIGHT - start);
    _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{start:.1}\" width=\"{wide:.1}\" height=\"{high:.1}\" \
         fill=\"{colour}\"/>"
    );
    let middle = x + wide / 2.0;
    let mut label = start;
    if let Some(upto) = bar.upto {
        line(svg, (middle, start), (middle, y(upto, top)), "#333333");
        label = y(upto, top);
    }
    let digits = if bar.value < 10.0 { 2 } else { 0 };
    text(svg, (middle, label - 4.0), "middle", &format!("{:.digits$}", bar.value));
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

fn line(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
    _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
    );
}

/// Where a value is drawn.
fn y(value: f64, top: f64) -> f64 {
    TOP + HEIGHT * (1.0 - value / top)
}

fn width(places: usize) -> f64 {
    BAR * count(places)
}

/// The next of 1, 2, 4, 6, 8, 10, 20, 40, ... at or above `value`.
fn round(value: f64) -> f64 {
    let mut unit = 0.01;
    while unit * 10.0 < value {
        unit *= 10.0;
    }
    let steps = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0].map(|step| step * unit);
    steps.into_iter().find(|step| *step >= value).unwrap_or(unit * 10.0)
}

fn count(n: usize) -> f64 {
    u32::try_from(n).map_or(0.0, f64::from)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_scale_ends_at_a_round_value() {
        for (value, end) in [(0.9, 1.0), (1.1, 2.0), (38.0, 40.0), (61.0, 80.0), (0.0, 0.01)] {
            assert!((round(value) - end).abs() < 1e-9, "{value}: {}", round(value));
        }
    }

    #[test]
    fn a_chart_has_a_bar_for_each_value_and_escapes_its_text() {
        let bar = |value| Bar { name: "1 volume".to_owned(), value, upto: Some(value * 2.0) };
        let group = Group { name: "a < b".to_owned(), bars: vec![bar(1.0), bar(2.0)] };
        let title = "Latency".to_owned();
        let svg = Chart { title, unit: "ms", groups: vec![group], goal: None }.svg();
        assert_eq!(svg.matches("fill=\"#0072b2\"").count(), 2, "a bar and its legend");
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"));
    }
}
