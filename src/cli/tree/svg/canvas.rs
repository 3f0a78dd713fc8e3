//! A small writer of SVG: rectangles, lines and text in whole pixels, all text escaped.

use std::fmt::{self, Write as _};

/// A picture that grows.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    out: String,
}

/// A place and its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

/// Text as XML may have it, in an element or an attribute.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '&' => out.write_str("&amp;")?,
                '<' => out.write_str("&lt;")?,
                '>' => out.write_str("&gt;")?,
                '"' => out.write_str("&quot;")?,
                // XML 1.0 has no way to write those at all.
                '\u{fffe}' | '\u{ffff}' => out.write_char('\u{fffd}')?,
                _ if letter.is_control() => out.write_char('\u{fffd}')?,
                _ => out.write_char(letter)?,
            }
        }
        Ok(())
    }
}

impl Canvas {
    /// Opens a group whose text shows where a pointer rests.
    pub(super) fn open(&mut self, title: &str) {
        self.line(format_args!("<g><title>{}</title>", Escaped(title)));
    }

    /// Closes it.
    pub(super) fn close(&mut self) {
        self.line(format_args!("</g>"));
    }

    /// A rectangle with rounded corners.
    pub(super) fn rect(&mut self, class: &str, area: Area, radius: usize) {
        let Area { x, y, width, height } = area;
        self.line(format_args!(
            r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>"#
        ));
    }

    /// Text whose baseline begins there.
    pub(super) fn text(&mut self, class: &str, x: usize, y: usize, text: &str) {
        let text = Escaped(text);
        self.line(format_args!(r#"<text class="{class}" x="{x}" y="{y}">{text}</text>"#));
    }

    /// A line, as SVG has paths.
    pub(super) fn path(&mut self, class: &str, path: fmt::Arguments<'_>) {
        self.line(format_args!(r#"<path class="{class}" d="{path}"/>"#));
    }

    /// The whole picture.
    pub(super) fn finish(self, width: usize, height: usize, style: &str) -> String {
        let Self { out } = self;
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>{style}</style>
<rect class="page" width="{width}" height="{height}"/>
{out}</svg>
"#
        )
    }

    fn line(&mut self, text: fmt::Arguments<'_>) {
        // A string takes everything.
        _ = writeln!(self.out, "{text}");
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn text_cannot_leave_its_place() {
        let mut canvas = Canvas::default();
        canvas.text("a", 1, 2, "</text><script>\"&\u{1b}\0é");
        assert_eq!(
            canvas.out,
            "<text class=\"a\" x=\"1\" y=\"2\">&lt;/text&gt;&lt;script&gt;&quot;&amp;\u{fffd}\u{fffd}é</text>\n"
        );
    }
}
